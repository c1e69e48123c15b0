"""`optimize` changes the speed of a ResNet, not its mathematics nor its state dict."""

from __future__ import annotations

import copy
import statistics

import pytest
import torch
from torch import nn

from bigstep.gpu import backend, optimize, set_groups
from bigstep.models import build_model
from bigstep.models.resnet import BasicBlock, Bottleneck, ResNet
from bigstep.norm import GhostBatchNorm2d
from interpreter import DEVICE, needs_triton


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
    side = 16 if image_size == 32 else 32  # what is left of it behind the stem and four layers is enough for a norm
    images = torch.randn(4, 3, side, side, dtype=torch.float64, device=DEVICE)
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


class Narrow(nn.Module):
    """A bottleneck ResNet of few channels, so that the interpreter is quick."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        inputs = 8
        for index, width in enumerate((8, 8, 16, 16)):
            stride = 1 if index == 0 else 2
            shortcut = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
            blocks = [Bottleneck(inputs, width, stride, shortcut)]
            if index == 1:  # one block without a shortcut of its own is enough
                blocks.append(Bottleneck(4 * width, width))
            self.add_module(f"layer{index + 1}", nn.Sequential(*blocks))
            inputs = 4 * width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, 5)

    forward = ResNet.forward


def errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    names = [name for name, value in want.items() if value.is_floating_point()]
    return {name: float((got[name].double() - want[name]).norm() / want[name].norm()) for name in names}


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from bigstep.gpu import batch_norm_launch

    # fewer and larger programs, since the interpreter takes them in turn
    for name, value in {"MULTIPROCESSORS": 1, "SUM_WAVES": 2, "STREAM_ROWS": 1024, "UNPOOL_PIXELS": 16}.items():
        monkeypatch.setattr(batch_norm_launch, name, value)
    monkeypatch.setattr(backend, "INTERPRET", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@needs_triton
@pytest.mark.usefixtures("only_kernels")
def test_kernels_carry_the_whole_network(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = Narrow().to(DEVICE)
    images = torch.randn(4, 3, 32, 32, device=DEVICE)
    want = step(copy.deepcopy(plain).double(), images.double())
    fused = copy.deepcopy(plain)
    assert optimize(fused).left == {}
    monkeypatch.setattr("bigstep.gpu.batch_norm.affine_by_group", None)  # no twin may run
    in_fp32 = errors(step(fused, images), want)
    assert max(in_fp32.values()) < 1e-3  # fp32 through 20 convolutions


def test_low_precision_is_as_close_to_float64_as_the_plain_network() -> None:
    ratios = []
    for seed in range(6):
        torch.manual_seed(seed)
        plain = Narrow().to(DEVICE)
        fused = copy.deepcopy(plain)
        optimize(fused)
        images = torch.randn(8, 3, 32, 32, device=DEVICE)
        want = step(copy.deepcopy(plain).double(), images.double())
        with torch.autocast(DEVICE, torch.bfloat16):
            eager, ours = errors(step(plain, images), want), errors(step(fused, images), want)
        ratios.append(statistics.median(ours[name] / eager[name] for name in eager if eager[name] > 0))
    # Errors of one seed go either way by a tenth: rounding decides on which side of zero a ReLU falls.
    assert statistics.geometric_mean(ratios) < 1.05


def test_what_is_not_known_is_left_and_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU())
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

    watched = resnet(BasicBlock, 32)
    watched.layer1[0].bn2.register_forward_hook(lambda *_: None)
    assert "hooks" in optimize(watched).left["layer1.0"]


class PreActivation(BasicBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.conv1(torch.relu(self.bn1(x)))
        return self.conv2(torch.relu(self.bn2(branch))) + x


class Scaled(BasicBlock):
    """Computes what its parent does until the scale, or the dropout, is something else."""

    def __init__(self, *args: object, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__(*args)
        self.scale, self.dropout = nn.Parameter(torch.tensor(scale)), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.bn2(self.conv2(self.dropout(self.relu(self.bn1(self.conv1(x))))))
        return self.relu(self.scale * branch + x)


class Severed(BasicBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x.detach()))))) + x)


class Timed(BasicBlock):
    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return super().forward(x + time)


OTHER_BLOCKS = {
    "pre-activation": lambda: PreActivation(8, 8),
    "scaled by 1 as yet": lambda: Scaled(8, 8),
    "dropout in training": lambda: Scaled(8, 8, dropout=0.1),
    "another gradient": lambda: Severed(8, 8),
    "two inputs": lambda: Timed(8, 8),
}


@pytest.mark.parametrize("name", OTHER_BLOCKS)
def test_a_block_of_the_same_parts_that_computes_something_else_is_left(name: str) -> None:
    torch.manual_seed(0)
    block = OTHER_BLOCKS[name]().double()
    nn.init.zeros_(block.bn2.weight)  # as blocks often begin: it hides the branch
    before, random = copy.deepcopy(block.state_dict()), torch.get_rng_state()
    report = optimize(nn.Sequential(block))
    assert report.fused == []
    words = "cannot be tried" if name == "two inputs" else "computes something other"
    assert words in report.left["0"]
    assert type(block).forward == block.forward.__func__
    assert block.training
    torch.testing.assert_close(block.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


class Tempered(ResNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def test_a_network_with_a_forward_of_its_own_keeps_it() -> None:
    torch.manual_seed(0)
    plain = Tempered(BasicBlock, (1, 1, 1, 1), classes=5, channels=3, image_size=32).double().to(DEVICE)
    fused = copy.deepcopy(plain)
    report = optimize(fused)
    assert report.fused == ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]
    assert "computes something other" in report.left["stem"]
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(fused(images), plain(images), rtol=1e-9, atol=1e-9)


def test_a_ghost_batch_norm_brings_its_workers() -> None:
    ghosts = resnet(BasicBlock, 32)
    for parent in list(ghosts.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                ghost = GhostBatchNorm2d(child.num_features, workers=2).double().to(DEVICE)
                ghost.load_state_dict(child.state_dict())
                setattr(parent, name, ghost)
    fused = copy.deepcopy(ghosts)
    assert optimize(fused).left == {}
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64, device=DEVICE)
    want, got = step(ghosts, images), step(fused, images)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("training", [True, False])
def test_norms_in_a_sequence_are_fused_with_the_relu_that_follows(training) -> None:
    torch.manual_seed(0)
    plain = build_model("resnet9", classes=5, channels=3, image_size=16).double().to(DEVICE).train(training)
    fused = copy.deepcopy(plain)
    report = optimize(fused)
    assert report.left == {}
    assert report.fused == ["7", "16", "1", "5", "10", "14"]  # residual blocks, then single convolutions
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64, device=DEVICE)
    want, got = step(plain, images), step(fused, images)
    assert list(plain.state_dict()) == list(fused.state_dict())
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_a_relu_with_two_places_stays() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), relu, nn.Conv2d(8, 8, 1), relu)
    assert optimize(model).left == {"1": "it is not in a block that is recognised"}
