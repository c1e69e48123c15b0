"""LARS in three launches, under Triton's interpreter, against its twin in float64."""

from __future__ import annotations

import copy

import pytest
import torch

from bigstep.gpu import backend, lars
from bigstep.gpu.chunks import why_not_kernels
from bigstep.gpu.lars import LarsKernels, LarsSettings, lars_step, lars_twin
from bigstep.optim import LARS
from interpreter import DEVICE, needs_triton

SHAPES = [(3, 5), (9000,), (4, 8, 3, 3), (7,), (2, 2)]
SETTINGS = [
    LarsSettings(weight_decay=1e-2, trust_coefficient=0.02, eps=1e-6),
    LarsSettings(weight_decay=5e-5, trust_coefficient=0.001),
    LarsSettings(weight_decay=1e-2, trust_coefficient=0.02, rate=1),
    LarsSettings(adapt=False),
    LarsSettings(trust_coefficient=0.5),  # its weights are zero: lambda is 1
]
LR = [0.5, 2.0]


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INTERPRET", True)


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=g).to(dtype).to(DEVICE) for shape in SHAPES]
    made[2] = made[2].contiguous(memory_format=torch.channels_last)
    return made


def weights() -> list[torch.Tensor]:
    made = tensors(0)
    made[4].zero_()
    return made


def exact(params, grads, velocities, nesterov: bool) -> None:
    lr = torch.tensor(LR, dtype=torch.float64, device=DEVICE)
    lars_twin(params, grads, velocities, SETTINGS, lr=lr, momentum=0.9, nesterov=nesterov)


@needs_triton
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("low", [torch.float32, torch.float16, torch.bfloat16])
def test_three_steps_agree_with_float64(nesterov, low, monkeypatch) -> None:
    monkeypatch.setattr(lars, "lars_twin", None)  # the kernels must take it
    params, velocities = weights(), tensors(1)
    params64, velocities64 = [p.double() for p in params], [v.double() for v in velocities]
    lr = torch.tensor(LR, device=DEVICE)
    for step in range(3):
        grads = tensors(2 + step, low)
        grads[3] = grads[3].float()  # norm parameters keep fp32 gradients beside fp16 ones
        grads[2] = grads[2].contiguous()  # laid out otherwise than the weights
        lars_step(params, grads, velocities, SETTINGS, lr=lr, momentum=0.9, nesterov=nesterov)
        exact(params64, [g.double() for g in grads], velocities64, nesterov)
    for got, want in zip([*params, *velocities], [*params64, *velocities64], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)  # fp32 state over three steps


@needs_triton
@pytest.mark.usefixtures("kernels_run")
def test_copies_are_rewritten_gradients_count_times_the_factor_and_skipped_steps_change_nothing() -> None:
    params, velocities = weights(), tensors(1)
    copies = [torch.zeros_like(p, dtype=torch.float16) if p.dim() > 1 else None for p in params]
    kernels = LarsKernels(params, velocities, SETTINGS, momentum=0.9, copies=copies)
    lr = torch.tensor(LR, device=DEVICE)
    factor, skipped = torch.tensor(1 / 64, device=DEVICE), torch.tensor(0.0, device=DEVICE)
    params64, velocities64 = [p.double() for p in params], [v.double() for v in velocities]
    grads = tensors(2)
    scaled = [64 * g for g in grads]
    kernels.bind(scaled)
    kernels.launch(scaled, {"lr": lr}, factor, skipped)
    exact(params64, [g.double() for g in grads], velocities64, False)
    for got, want in zip(params, params64, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    for param, low in zip(params, copies, strict=True):
        assert low is None or torch.equal(low, param.half())

    before = [t.clone() for t in (*params, *velocities, *(c for c in copies if c is not None))]
    scaled[1][17] = float("inf")
    kernels.launch(scaled, {"lr": lr}, factor, skipped.fill_(1))
    after = [*params, *velocities, *(c for c in copies if c is not None)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@needs_triton
@pytest.mark.usefixtures("kernels_run")
def test_the_optimizer_keeps_its_kernels_and_makes_new_ones_when_its_tensors_change() -> None:
    params = [torch.nn.Parameter(w) for w in weights()]
    optimizer = LARS(params, lr=0.5, trust_coefficient=0.02)
    plain = [p.detach().double().requires_grad_() for p in params]
    reference = LARS(plain, lr=0.5, trust_coefficient=0.02)
    kept = []
    for step in range(4):
        for ours, theirs, grad in zip(params, plain, tensors(2 + step), strict=True):
            ours.grad, theirs.grad = grad, grad.double()
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # new velocities
        optimizer.step()
        reference.step()
        kept.append(optimizer._kept[1])
    assert kept[0] is kept[1] is not kept[2] is kept[3]
    for got, want in zip(params, plain, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)  # fp32 state over four steps


@needs_triton
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(("elements", "words"), [(2**31 - 1, None), (2**31, "2,147,483,648 elements")])
def test_a_tensor_whose_elements_32_bits_do_not_count_is_left_to_the_twin(elements: int, words: str | None) -> None:
    reason = why_not_kernels([torch.empty(elements, device="meta")], [torch.empty(elements, device="meta")])
    assert reason is None if words is None else words in reason


def test_on_the_cpu_the_twin_runs() -> None:
    params, velocities = weights(), tensors(1)
    params64, velocities64 = [p.double() for p in params], [v.double() for v in velocities]
    grads = tensors(2)
    lr = torch.tensor(LR, device=DEVICE)
    lars_step(params, grads, velocities, SETTINGS, lr=lr, momentum=0.9)
    exact(params64, [g.double() for g in grads], velocities64, False)
    for got, want in zip(params, params64, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
