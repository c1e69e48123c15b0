"""LARS in three launches, under Triton's interpreter, against its twin in float64."""

from __future__ import annotations

import importlib.util
import os

# Read when a kernel is defined, so it must be set before any kernel module is imported.
if not os.environ.get("BIGSTEP_TEST_GPU"):
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from bigstep.gpu import backend, lars
from bigstep.gpu.lars import LarsKernels, LarsSettings, lars_step, lars_twin

DEVICE = "cuda" if os.environ.get("BIGSTEP_TEST_GPU") else "cpu"
SHAPES = [(3, 5), (9000,), (4, 8, 3, 3), (7,), (2, 2)]
SETTINGS = [
    LarsSettings(weight_decay=1e-2, trust_coefficient=0.02, eps=1e-6),
    LarsSettings(weight_decay=5e-5, trust_coefficient=0.001),
    LarsSettings(weight_decay=1e-2, trust_coefficient=0.02, rate=1),
    LarsSettings(adapt=False),
    LarsSettings(trust_coefficient=0.5),  # its weights are zero: lambda is 1
]
LR = [0.5, 2.0]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


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
def test_copies_loss_scale_and_skipped_steps() -> None:
    params, velocities = weights(), tensors(1)
    copies = [torch.zeros_like(p, dtype=torch.float16) if p.dim() > 1 else None for p in params]
    kernels = LarsKernels(params, velocities, SETTINGS, momentum=0.9, copies=copies)
    lr = torch.tensor(LR, device=DEVICE)
    scale = torch.tensor(64.0, device=DEVICE)
    good = torch.zeros((), dtype=torch.int32, device=DEVICE)
    params64, velocities64 = [p.double() for p in params], [v.double() for v in velocities]
    grads = tensors(2)
    scaled = [64 * g for g in grads]
    kernels.bind(scaled)
    kernels.launch(lr, scale=scale, good_steps=good, growth_interval=2)
    exact(params64, [g.double() for g in grads], velocities64, False)
    for got, want in zip(params, params64, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    for param, copy in zip(params, copies, strict=True):
        assert copy is None or torch.equal(copy, param.half())
    assert (scale.item(), good.item(), kernels.skipped.item()) == (64.0, 1, 0.0)

    before = [t.clone() for t in (*params, *velocities)]
    scaled[1][17] = float("inf")
    kernels.launch(lr, scale=scale, good_steps=good, growth_interval=2)
    assert all(torch.equal(a, b) for a, b in zip(before, (*params, *velocities), strict=True))
    assert (scale.item(), good.item(), kernels.skipped.item()) == (32.0, 0, 1.0)

    scaled[1][17] = 0.0
    for _ in range(2):
        kernels.launch(lr, scale=scale, good_steps=good, growth_interval=2)
    assert (scale.item(), good.item(), kernels.skipped.item()) == (64.0, 0, 0.0)


def test_on_the_cpu_the_twin_runs() -> None:
    params, velocities = weights(), tensors(1)
    params64, velocities64 = [p.double() for p in params], [v.double() for v in velocities]
    grads = tensors(2)
    lr = torch.tensor(LR, device=DEVICE)
    lars_step(params, grads, velocities, SETTINGS, lr=lr, momentum=0.9)
    exact(params64, [g.double() for g in grads], velocities64, False)
    for got, want in zip(params, params64, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
