"""Whole-step graphs: the same training as step by step.

Here they run through the tape that stands for a CUDA graph; with BIGSTEP_TEST_GPU=1 the same tests make real graphs.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bigstep.gpu import GraphedStep, optimize, set_groups
from bigstep.gpu.loss_scale import LossScale
from bigstep.losses import SampleCrossEntropy
from bigstep.models.resnet import BasicBlock, ResNet
from bigstep.optim import LAMB, LARS, AdaGradSGD, Muon, RMSpropWarmup, parameter_groups
from interpreter import DEVICE

gpu = pytest.mark.gpu
LOSS = SampleCrossEntropy(label_smoothing=0.1)
RATES = {  # powers of two: on a GPU a graph reads them as fp32
    "lars": 2**-1, "sgd": 2**-4, "adamw": 2**-12, "rmsprop_warmup": 2**-4, "adagrad": 2**-7, "behind": 2**-4,
    "lamb": 2**-8, "muon": 2**-8,
}  # fmt: skip


class Small(nn.Module):
    """Two blocks with what graphs have to cope with: batch norm, dropout that is off, a layer without bias."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.relu(self.bn2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


class Tokens(nn.Module):
    """No batch norm, an embedding tied to the head, and targets of the shape of the inputs."""

    def __init__(self, vocabulary: int = 11, width: int = 16) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + functional.gelu(self.mix(x))))


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=-100)


def model_and_batch(size: int = 16, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Small().to(DEVICE, dtype)
    return model, torch.randn(size, 3, 8, 8).to(DEVICE, dtype), torch.randint(10, (size,)).to(DEVICE)


def network_and_batch(size: int = 16) -> tuple[nn.Module, Tensor, Tensor]:
    """A network for `optimize`: on a GPU a ResNet, which a CPU would take too long for."""
    if DEVICE == "cpu":
        return model_and_batch(size)
    torch.manual_seed(0)
    model = ResNet(BasicBlock, (1, 1, 1, 1), classes=10, channels=3, image_size=32).cuda()
    return model, torch.randn(size, 3, 32, 32, device="cuda"), torch.randint(10, (size,), device="cuda")


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "lars":
        return LARS(parameter_groups(model, 1e-4), lr=RATES[kind], trust_coefficient=0.01)
    if kind == "lamb":
        return LAMB(parameter_groups(model, 1e-2), lr=RATES[kind])
    if kind == "muon":
        return Muon(parameter_groups(model, 1e-2), lr=RATES[kind])
    if kind == "rmsprop_warmup":
        return RMSpropWarmup(parameter_groups(model, 1e-4), lr=RATES[kind])
    if kind == "adagrad":
        return AdaGradSGD(parameter_groups(model, 1e-4), lr=RATES[kind])
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=RATES[kind], fused=True)
    return torch.optim.SGD(model.parameters(), lr=RATES[kind], momentum=0.9, fused=kind == "sgd")


def graphed(model: nn.Module, optimizer: Any, loss: Any = LOSS, **settings: Any) -> GraphedStep:
    return GraphedStep(model, loss, optimizer, emulate=DEVICE == "cpu", **settings)


def eager_step(
    model: nn.Module, optimizer: Any, loss: Any, inputs: Tensor, targets: Tensor, clip: float | None
) -> Tensor:
    value = loss(model(inputs), targets)
    optimizer.zero_grad()
    value.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return value.detach()


def change_settings(kind: str, index: int, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = RATES[kind] * 0.5 ** (index // 2)  # rates change under the graph
            if kind == "rmsprop_warmup":
                group["blend"] = 1 - 0.5 * (index // 2)  # far apart: a graph that ignored it would be off by half


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", RATES)
def test_in_float64_a_graph_takes_the_path_of_plain_steps(kind: str, clip: float | None) -> None:
    model, images, labels = model_and_batch(dtype=torch.float64)
    plain = copy.deepcopy(model)
    ours, theirs = optimizer_of(kind, model), optimizer_of(kind, plain)
    step = graphed(model, ours, precision="float64", clip=clip)
    for index in range(6):
        change_settings(kind, index, ours, theirs)
        inputs = images + 0.1 * index
        want = eager_step(plain, theirs, LOSS, inputs, labels, clip)
        torch.testing.assert_close(step(inputs, labels), want, rtol=1e-10, atol=0)  # another order of roundings
    # buffers have been advanced by the steps alone, not by warming up
    assert int(model.bn1.num_batches_tracked) == 6
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-12)
    assert len(step._captured) == 1


@pytest.mark.parametrize("kind", RATES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_in_low_precision_a_graph_follows_fp32_training(kind: str, precision: str) -> None:
    model, images, labels = network_and_batch()
    plain = copy.deepcopy(model)
    optimize(model)
    ours, theirs = optimizer_of(kind, model), optimizer_of(kind, plain)
    step = graphed(model, ours, precision=precision)
    for index in range(6):
        change_settings(kind, index, ours, theirs)
        want = eager_step(plain, theirs, LOSS, images, labels, None)
        assert abs(step(images, labels).item() - want.item()) < 0.03 * want.item()  # low precision over six steps
    assert float(step.skipped) == 0
    for param, low in zip(step.params, step.copies.each, strict=True):
        assert low is None or torch.equal(low, param.to(step.dtype))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", ["lars", "adamw", "behind"])
def test_a_batch_in_parts_is_the_step_of_the_whole_batch(kind: str, clip: float | None) -> None:
    torch.manual_seed(0)
    model = Tokens().to(DEVICE, torch.float64)  # batch norm would see other batches
    tokens, targets = torch.randint(11, (6, 7), device=DEVICE), torch.randint(11, (6, 7), device=DEVICE)
    targets[4:, 3:] = -100  # parts with unequal numbers of targets
    plain = copy.deepcopy(model)
    ours, theirs = optimizer_of(kind, model), optimizer_of(kind, plain)
    step = graphed(model, ours, token_loss, precision="float64", clip=clip)
    counts = [int((part != -100).sum()) for part in targets.split(2)]
    for index in range(4):
        change_settings(kind, index, ours, theirs)
        want = eager_step(plain, theirs, token_loss, tokens, targets, clip)
        if index % 2:
            got = step(tokens, targets)
        else:
            shares = [count / sum(counts) for count in counts]
            parts = zip(tokens.split(2), targets.split(2), shares, strict=True)
            got = sum(step.add(x, y, share) * share for x, y, share in parts)
            step.update()
        torch.testing.assert_close(got, want, rtol=1e-10, atol=0)  # another order of sums


@pytest.mark.parametrize("precision", ["fp16", "bf16", "float32"])
def test_tokens_stay_integers_and_a_tied_embedding_keeps_full_precision(precision: str) -> None:
    torch.manual_seed(0)
    model = Tokens().to(DEVICE)
    tokens = torch.arange(11, device=DEVICE).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = graphed(model, optimizer, token_loss, precision=precision)
    first = float(step(tokens, tokens.roll(-1, 1)))
    for _ in range(60):
        last = float(step(tokens, tokens.roll(-1, 1)))
    assert last < 0.3 * first
    assert step._captured[next(iter(step._captured))].inputs.dtype == torch.int64
    assert list(step.copies.by_name) == ([] if precision == "float32" else ["mix.weight", "mix.bias"])


def test_dropout_does_not_depend_on_when_a_graph_was_made() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.5), nn.Linear(32, 10)).to(DEVICE, torch.float64)
    inputs, labels = torch.randn(8, 12).to(DEVICE, torch.float64), torch.randint(10, (8,)).to(DEVICE)
    twin, plain = copy.deepcopy(model), copy.deepcopy(model)
    early, late = (graphed(m, optimizer_of("sgd", m), precision="float64") for m in (model, twin))
    reference = optimizer_of("sgd", plain)
    for index in range(4):
        losses = []
        for step in (early, late, lambda x, y: eager_step(plain, reference, LOSS, x, y, None)):
            torch.manual_seed(index)
            losses.append(float(step(inputs, labels)))
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        if DEVICE == "cpu":  # CUDA graphs draw their numbers in an order of their own
            assert losses[0] == pytest.approx(losses[2], rel=1e-12)
        early.rehearse()
        late._captured.clear()


def test_other_shapes_and_groups_make_other_graphs_of_the_same_weights() -> None:
    model, images, labels = network_and_batch(32)
    optimize(model)
    step = graphed(model, optimizer_of("lars", model))
    first = float(step(images, labels))
    for _ in range(5):
        step(images[:16], labels[:16])
    set_groups(model, 4)
    step(images, labels)
    set_groups(model, 1)
    assert float(step(images, labels)) < first
    assert len(step._captured) == 3


@pytest.mark.parametrize("kind", RATES)
def test_a_step_that_is_not_finite_changes_nothing_and_halves_the_scale(kind: str) -> None:
    model, images, labels = network_and_batch()
    optimize(model)
    step = graphed(model, optimizer_of(kind, model))
    step(images, labels)
    kept = [*model.parameters(), *(value for state in step.optimizer.state.values() for value in state.values())]
    before = [tensor.detach().clone() for tensor in kept]
    bad = images.clone()
    bad[0, 0, 0, 0] = float("inf")
    step(bad, labels)
    assert float(step.skipped) == 1
    assert float(step.scale) == 512
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


def test_a_graph_shares_a_loss_scale_and_reads_what_is_loaded_into_it() -> None:
    model, images, labels = model_and_batch()
    shared = LossScale(DEVICE, scale=64.0, growth_interval=2)
    step = graphed(model, optimizer_of("sgd", model), scale=shared)
    scales = []
    for _ in range(4):
        step(images, labels)
        scales.append(shared.get_scale())
    assert scales == [64.0, 128.0, 128.0, 256.0]
    theirs = torch.amp.GradScaler(DEVICE, init_scale=32.0, growth_factor=4.0, growth_interval=3)
    step.load_scaler_state({**theirs.state_dict(), "_growth_tracker": 1})
    scales = []
    for _ in range(2):
        step(images, labels)
        scales.append(shared.get_scale())
    assert scales == [32.0, 128.0]  # by the loaded rule, not the one of the graphs before


@pytest.mark.parametrize("kind", ["lars", "adamw", "sgd", "rmsprop_warmup"])
def test_state_that_is_loaded_between_steps_is_used(kind: str) -> None:
    model, images, labels = model_and_batch()
    step = graphed(model, optimizer_of(kind, model), precision="bf16")
    for _ in range(2):
        step(images, labels)
    kept = copy.deepcopy((model.state_dict(), step.optimizer.state_dict()))
    first = [float(step(images, labels)) for _ in range(3)]
    model.load_state_dict(kept[0])
    step.optimizer.load_state_dict(kept[1])
    again = [float(step(images, labels)) for _ in range(3)]
    assert again == (first if DEVICE == "cpu" else pytest.approx(first, rel=1e-2))  # sums of a GPU in any order


def test_weights_that_are_changed_from_outside_are_noticed() -> None:
    model, images, labels = model_and_batch()
    step = graphed(model, torch.optim.SGD(model.parameters(), lr=0.0, fused=True), precision="bf16")
    first = float(step(images, labels))
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    assert float(step(images, labels)) == pytest.approx(math.log(10), rel=1e-3)  # all classes alike
    assert first != pytest.approx(math.log(10), rel=1e-3)


@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_a_gradient_is_clipped_after_it_is_unscaled(scale: float) -> None:
    model, images, labels = model_and_batch()
    before = [p.detach().clone() for p in model.parameters()]
    step = graphed(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=True), scale=scale, clip=0.01)
    step(images, labels)
    moved = torch.stack([(p.detach() - b).norm() for p, b in zip(model.parameters(), before, strict=True)]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-3)  # 1e-6 is added to the norm, and weights round


def test_a_rehearsal_leaves_no_trace() -> None:
    model, images, labels = model_and_batch()
    step = graphed(model, optimizer_of("lars", model))
    step(images, labels)
    before = copy.deepcopy(model.state_dict())
    step.rehearse()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_what_a_step_computes_in_python_is_fixed_in_the_graph() -> None:
    """As in a CUDA graph: else a test on the tape would show nothing about one."""
    model, images, labels = model_and_batch()
    factor = [1.0]
    step = graphed(model, optimizer_of("sgd", model), lambda out, y: factor[0] * LOSS(out, y), precision="float32")
    first = float(step(images, labels))
    factor[0] = 100.0
    assert float(step(images, labels)) < first


@gpu
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch 2.11, while it imports its compiler
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
# torch's compiler captures an empty graph on purpose, to keep its memory pool alive
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_graph_survives_those_of_torch_compile() -> None:
    model, images, labels = network_and_batch()
    optimize(model)
    step = graphed(model, optimizer_of("lars", model))
    first = float(step(images, labels))
    other = torch.compile(nn.Linear(64, 64).cuda(), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            other(torch.randn(8, 64, device="cuda"))
    torch.cuda.empty_cache()
    for _ in range(10):
        last = float(step(images, labels))
    assert last < first


@gpu
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch 2.11, while it imports its compiler
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_compiled_step_in_a_graph_follows_the_plain_one(precision: str) -> None:
    torch.manual_seed(0)
    model = Tokens().to(DEVICE)
    twin = copy.deepcopy(model)
    tokens = torch.arange(11, device=DEVICE).repeat(4, 1)
    steps = [
        graphed(m, torch.optim.AdamW(m.parameters(), lr=0.01, fused=True), token_loss, precision=precision, compiled=c)
        for m, c in ((model, True), (twin, False))
    ]
    for _ in range(20):
        ours, plain = (float(step(tokens, tokens.roll(-1, 1))) for step in steps)
        assert ours == pytest.approx(plain, rel=0.05 if precision == "bf16" else 1e-3)  # other roundings over 20 steps


def test_an_optimizer_that_lives_on_keeps_no_graph_of_a_step_that_was_closed() -> None:
    model, images, labels = model_and_batch()
    optimizer = optimizer_of("sgd", model)
    step = graphed(model, optimizer)
    step(images, labels)
    graph, copies = (weakref.ref(each) for each in (next(iter(step._captured.values())).graph, step.copies))
    step.close()
    assert graph() is None
    del step
    gc.collect()
    assert copies() is None
    assert optimizer.state
