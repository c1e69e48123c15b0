"""`optimize` changes the speed of a ResNet, not its mathematics nor its state dict."""

from __future__ import annotations

import copy
import importlib.util
import os

# Read when a kernel is defined, so it must be set before any kernel module is imported.
if not os.environ.get("BIGSTEP_TEST_GPU"):
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import nn

from bigstep.kernels import backend, optimize, set_groups
from bigstep.models.resnet import BasicBlock, Bottleneck, ResNet

DEVICE = "cuda" if os.environ.get("BIGSTEP_TEST_GPU") else "cpu"


def resnet(block, image_size: int, seed: int = 0) -> ResNet:
    torch.manual_seed(seed)
    model = ResNet(block, (1, 1, 1, 1), classes=5, channels=3, image_size=image_size).double().to(DEVICE)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model


def step(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs = model(images)
    outputs.double().square().sum().backward()
    values = {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
    return {"outputs": outputs.detach(), **values}


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
@pytest.mark.parametrize("image_size", [32, 224])  # two stems: with and without pooling
@pytest.mark.parametrize("training", [True, False])
def test_fused_network_is_the_network(block, image_size, training) -> None:
    plain = resnet(block, image_size).train(training)
    fused = copy.deepcopy(plain)
    report = optimize(fused)
    assert report.left == {}
    assert report.fused == ["layer1.0", "layer2.0", "layer3.0", "layer4.0", "stem"]
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64, device=DEVICE)
    want, got = step(plain, images), step(fused, images)
    assert list(plain.state_dict()) == list(fused.state_dict())
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_groups_give_the_mean_gradient_of_separate_workers() -> None:
    fused = resnet(BasicBlock, 32)
    optimize(fused, groups=2)
    workers = [resnet(BasicBlock, 32) for _ in range(2)]
    images = torch.randn(8, 3, 16, 16, dtype=torch.float64, device=DEVICE)
    got = step(fused, images)
    want = [step(worker, images[4 * k : 4 * k + 4]) for k, worker in enumerate(workers)]
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(parameter.grad, want[0][name] + want[1][name], rtol=1e-8, atol=1e-8)
    for name, buffer in fused.named_buffers():
        if buffer.is_floating_point():
            torch.testing.assert_close(buffer, (want[0][name] + want[1][name]) / 2)
    set_groups(fused, 1)
    assert not torch.equal(step(fused, images)["outputs"], got["outputs"])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_carry_the_whole_network(monkeypatch) -> None:
    exact = resnet(BasicBlock, 224)
    fused = copy.deepcopy(exact).float()
    optimize(fused)
    monkeypatch.setattr(backend, "INTERPRET", True)
    from bigstep.kernels import batch_norm

    monkeypatch.setattr(batch_norm, "affine_by_group", None)  # no twin may run
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    images = torch.randn(4, 3, 16, 16, device=DEVICE)
    got = step(fused, images)
    monkeypatch.undo()
    want = step(exact, images.double())
    for name, value in want.items():
        if value.is_floating_point():  # fp32 through sixteen layers of small batches
            error = (got[name].double() - value).norm() / value.norm()
            assert error < 1e-3, name


def test_what_is_not_known_is_left_and_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    report = optimize(model)
    assert report.fused == []
    assert report.left == {"1": "it is not in a block that is recognised"}

    odd = resnet(BasicBlock, 32)
    odd.layer2[0].relu = nn.SiLU()
    report = optimize(odd)
    assert report.left["layer2.0"] == "its activation relu is SiLU, not ReLU"
    assert report.left["stem"] == "not every block is fused"
    assert "layer1.0" in report.fused
    assert torch.isfinite(odd(torch.randn(2, 3, 16, 16, dtype=torch.float64, device=DEVICE))).all()
    assert "left layer2.0" in str(report)
