"""LAMB in four launches, under Triton's interpreter, against its twin in float64."""

from __future__ import annotations

import pytest
import torch

from bigstep.gpu import backend
from bigstep.gpu.lamb import LambKernels, LambSettings, adamw_kernels, lamb_twin
from bigstep.gpu.update import make_update
from bigstep.optim import LAMB
from bigstep.optim import lamb as lamb_module
from interpreter import DEVICE, needs_triton

SHAPES = [(3, 5), (9000,), (4, 8, 3, 3), (7,), (2, 2)]
SETTINGS = [
    LambSettings(weight_decay=1e-2),
    LambSettings(weight_decay=5e-5, betas=(0.0, 0.9), eps=1e-4),
    LambSettings(weight_decay=1e-2, rate=1),
    LambSettings(adapt=False),
    LambSettings(),  # its weights are zero: the ratio is 1
]
LR = [0.05, 0.2]
pytestmark = needs_triton


@pytest.fixture(autouse=True)
def _kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
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


def state() -> tuple[list[torch.Tensor], ...]:
    """Weights, both moments and the number of steps, in fp32."""
    zeros = [[torch.zeros_like(w) for w in weights()] for _ in range(2)]
    return weights(), *zeros, [torch.zeros((), device=DEVICE) for _ in SHAPES]


def doubled(lists: tuple[list[torch.Tensor], ...]) -> tuple[list[torch.Tensor], ...]:
    return tuple([t.double() for t in each] for each in lists)


@pytest.mark.parametrize("low", [torch.float32, torch.float16, torch.bfloat16])
def test_three_steps_with_factor_and_copies_agree_with_float64(low: torch.dtype) -> None:
    ours, exact = state(), doubled(state())
    narrow = torch.float16 if low == torch.float32 else low
    copies = [torch.zeros_like(p, dtype=narrow) if p.dim() > 1 else None for p in ours[0]]
    kernels = LambKernels(*ours, SETTINGS, copies=copies, narrow=narrow)
    lr, factor = torch.tensor(LR, device=DEVICE), torch.tensor(1 / 64, device=DEVICE)
    for step in range(3):
        grads = [64 * g for g in tensors(2 + step, low)]
        grads[3] = grads[3].float()  # norm parameters keep fp32 gradients beside fp16 ones
        kernels.bind(grads)
        kernels.launch(grads, {"lr": lr}, factor)
        params, *rest = exact
        lamb_twin(params, [g.double() / 64 for g in grads], *rest, SETTINGS, lr=lr.double())
    for got, want in zip(ours, exact, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=1e-6)  # fp32 state over three steps
    for param, low_copy in zip(ours[0], copies, strict=True):
        if low_copy is not None:  # the interpreter cuts bf16 off where a GPU rounds
            torch.testing.assert_close(low_copy.float(), param, rtol=2**-7 if low == torch.bfloat16 else 2**-11, atol=0)


def test_a_skipped_step_changes_nothing_not_even_the_count() -> None:
    ours = state()
    kernels = LambKernels(*ours, SETTINGS)
    lr, skipped = torch.tensor(LR, device=DEVICE), torch.zeros((), device=DEVICE)
    grads = tensors(2)
    kernels.bind(grads)
    kernels.launch(grads, {"lr": lr}, None, skipped)
    before = [[t.clone() for t in each] for each in ours]
    grads[1][17] = float("inf")
    kernels.launch(grads, {"lr": lr}, None, skipped.fill_(1))
    for got, want in zip(ours, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert [float(t) for t in ours[3]] == [1.0] * len(SHAPES)


def test_the_optimizer_takes_the_kernels_and_their_path_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb_module, "lamb", None)  # the kernels must take it
    params = [torch.nn.Parameter(w) for w in weights()]
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "adapt": False, "lr": 0.01}]
    optimizer = LAMB(groups, lr=0.1)
    _, *rest = exact = doubled(state())
    settings = [LambSettings(weight_decay=0.1)] * 3 + [LambSettings(adapt=False, rate=1)] * 2
    for step in range(3):
        grads = tensors(2 + step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        lr = torch.tensor([0.1, 0.01], dtype=torch.float64, device=DEVICE)
        lamb_twin(exact[0], [g.double() for g in grads], *rest, settings, lr=lr)
    for got, want in zip(params, exact[0], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)  # fp32 state over three steps


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
def test_without_adaptation_two_launches_are_torchs_adamw(low: torch.dtype) -> None:
    params = [torch.nn.Parameter(w) for w in weights()]
    plain = [p.detach().double().requires_grad_() for p in params]
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)
    twins = [{"params": plain[:3], "weight_decay": 0.1}, {"params": plain[3:], "weight_decay": 0.0, "lr": 0.02}]
    reference = torch.optim.AdamW(twins, lr=0.1, betas=(0.9, 0.95))
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) if p.dim() > 1 else None for p in params]
    kernels = adamw_kernels(optimizer, params, copies)
    assert kernels is not None
    assert not kernels.adapts
    lr, factor, skipped = torch.tensor([0.1, 0.02]), torch.tensor(1 / 64), torch.zeros(())
    rates = {"lr": lr.to(DEVICE)}
    for step in range(4):
        grads = [64 * g for g in tensors(2 + step, low)]
        kernels.bind(grads)
        kernels.launch(grads, rates, factor.to(DEVICE), skipped.to(DEVICE).fill_(step == 2))
        if step != 2:  # that one is skipped
            for twin, grad in zip(plain, grads, strict=True):
                twin.grad = grad.double() / 64
            reference.step()
    for got, want, low_copy in zip(params, plain, copies, strict=True):
        torch.testing.assert_close(got.detach().double(), want.detach(), rtol=2e-5, atol=1e-6)  # fp32 over three steps
        if low_copy is not None:  # the interpreter cuts bf16 off where a GPU rounds
            torch.testing.assert_close(low_copy.float(), got.detach(), rtol=2**-7, atol=0)
    assert [float(optimizer.state[p]["step"]) for p in params] == [3.0] * len(params)


def test_an_adamw_that_the_kernels_do_not_know_is_left_to_torch() -> None:
    params = [torch.nn.Parameter(w) for w in weights()]
    nothing = [None] * len(params)
    for kind, settings in (
        (torch.optim.AdamW, {"fused": False}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.Adam, {"fused": True}),
    ):
        assert adamw_kernels(kind(params, lr=0.1, **settings), params, nothing) is None

    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    kept = {"step": torch.ones(()), "exp_avg": torch.zeros(5, 3).t(), "exp_avg_sq": torch.zeros(5, 3).t()}
    optimizer.state[params[0]] = kept  # laid out unlike its weight
    assert adamw_kernels(optimizer, params, nothing) is None
    assert dict(optimizer.state) == {params[0]: kept}, "what is left to torch gets no state from us"


def test_an_optimizer_with_an_update_of_its_own_is_asked_alone() -> None:
    params = [torch.nn.Parameter(w) for w in weights()]
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    optimizer.graph_update = lambda params, copies: None
    make_update(optimizer, params, [None] * len(params))
    assert not optimizer.state
