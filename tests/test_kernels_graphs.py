"""Whole-step CUDA graphs: the same training as step by step. Most of it needs a GPU and is run by hand there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bigstep.errors import ConfigError
from bigstep.gpu import GraphedStep, optimize, set_groups
from bigstep.models.resnet import BasicBlock, ResNet
from bigstep.optim import LARS, AdaGradSGD, RMSpropWarmup, parameter_groups

gpu = pytest.mark.gpu
LOSS = nn.CrossEntropyLoss(label_smoothing=0.1)
RATES = {"lars": 0.5, "sgd": 0.05, "rmsprop_warmup": 0.05, "adagrad": 0.01}


def model_and_batch(size: int = 16) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=10, channels=3, image_size=32).cuda()
    return model, torch.randn(size, 3, 32, 32, device="cuda"), torch.randint(10, (size,), device="cuda")


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "lars":
        return LARS(parameter_groups(model, 1e-4), lr=RATES[kind], trust_coefficient=0.01)
    if kind == "rmsprop_warmup":
        return RMSpropWarmup(parameter_groups(model, 1e-4), lr=RATES[kind])
    if kind == "adagrad":
        return AdaGradSGD(parameter_groups(model, 1e-4), lr=RATES[kind])
    return torch.optim.SGD(model.parameters(), lr=RATES[kind], momentum=0.9, fused=True)


@gpu
@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_graph_follows_fp32_training(kind, precision) -> None:
    model, images, labels = model_and_batch()
    plain = copy.deepcopy(model)
    optimize(model)
    step = GraphedStep(model, LOSS, graphed := optimizer_of(kind, model), precision=precision)
    reference = optimizer_of(kind, plain)
    for index in range(6):
        rate = 0.5 ** (index // 2)  # rates change under the graph
        for optimizer in (graphed, reference):
            for group in optimizer.param_groups:
                group["lr"] = rate * RATES[kind]
                if kind == "rmsprop_warmup":
                    group["blend"] = 1 - 0.5 * (index // 2)  # far apart: a graph that ignored it would be off by half
        want = LOSS(plain(images), labels)
        reference.zero_grad()
        want.backward()
        reference.step()
        got = step(images, labels)
        assert abs(got.item() - want.item()) < 0.03 * want.item()  # low precision over six steps
    assert float(step.skipped) == 0
    # buffers have been advanced by the steps alone, not by warming up
    assert int(model.bn1.num_batches_tracked) == 6


@gpu
def test_other_shapes_and_groups_make_other_graphs_of_the_same_weights() -> None:
    model, images, labels = model_and_batch(32)
    optimize(model)
    step = GraphedStep(model, LOSS, optimizer_of("lars", model))
    first = float(step(images, labels))
    for _ in range(5):
        step(images[:16], labels[:16])
    set_groups(model, 4)
    step(images, labels)
    set_groups(model, 1)
    assert float(step(images, labels)) < first
    assert len(step._graphs) == 3


@gpu
@pytest.mark.parametrize("kind", RATES)
def test_a_step_that_is_not_finite_changes_nothing_and_halves_the_scale(kind) -> None:
    model, images, labels = model_and_batch()
    optimize(model)
    step = GraphedStep(model, LOSS, optimizer_of(kind, model))
    step(images, labels)
    optimizer = step.optimizer
    kept = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    before = [tensor.detach().clone() for tensor in kept]
    bad = images.clone()
    bad[0, 0, 0, 0] = float("inf")
    step(bad, labels)
    assert float(step.skipped) == 1
    assert float(step.scale) == 512
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


@gpu
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch 2.11, while it imports its compiler
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_a_graph_survives_those_of_torch_compile() -> None:
    model, images, labels = model_and_batch()
    optimize(model)
    step = GraphedStep(model, LOSS, optimizer_of("lars", model))
    first = float(step(images, labels))
    other = torch.compile(nn.Linear(64, 64).cuda(), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            other(torch.randn(8, 64, device="cuda"))
    torch.cuda.empty_cache()
    for _ in range(10):
        last = float(step(images, labels))
    assert last < first


def test_what_cannot_be_graphed_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = LARS(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="CUDA device"):
        GraphedStep(model, LOSS, optimizer)
    with pytest.raises(ConfigError, match="allowed are fp16, bf16, float32"):
        GraphedStep(model, LOSS, optimizer, precision="fp8")
