"""The kernels of the cross-entropy against float64, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional

from bigstep.gpu import backend, cross_entropy
from bigstep.losses import IGNORED, CrossEntropy
from interpreter import DEVICE, needs_triton

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INTERPRET", True)


def exact(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and its gradient in float64, by torch."""
    wide = logits.detach().double().requires_grad_()
    loss = functional.cross_entropy(wide, target, ignore_index=IGNORED, label_smoothing=smoothing)
    (3 * loss).backward()
    assert wide.grad is not None
    return loss.detach(), wide.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [3, 16, 257, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_float64(
    dtype: torch.dtype, classes: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "BLOCK", 256)  # rows of several blocks, the last one cut
    generator = torch.Generator().manual_seed(classes)
    logits = (5 * torch.randn(9, classes, generator=generator)).to(DEVICE, dtype)
    target = torch.randint(0, classes, (9,), generator=generator).to(DEVICE)
    target[[2, 8]] = IGNORED
    reference, gradient = exact(logits, target, smoothing)
    ours = logits.clone().requires_grad_()
    loss = CrossEntropy(smoothing)(ours, target)
    assert "RowSum" in type(loss.grad_fn.next_functions[0][0]).__name__  # the kernels ran, not torch's own
    (3 * loss).backward()
    torch.testing.assert_close(loss.double(), reference, rtol=2e-6, atol=0)  # sums of a thousand in float32
    # one rounding to the logits' precision, and exp in float32 (a few units of 6e-8 times logits up to 20)
    rounds = DEVICE == "cuda" or dtype != torch.bfloat16  # Triton's interpreter cuts to bf16 where a GPU rounds
    rounding = torch.finfo(dtype).eps / (2 if rounds else 1) + 4e-6
    torch.testing.assert_close(ours.grad.double(), gradient, rtol=rounding, atol=1e-7)


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [float("-inf"), 0.0, 1.0]], device=DEVICE)
    target = torch.tensor([1, 2, 2], device=DEVICE)
    costs, _ = cross_entropy.row_costs(logits, target, 0.0)
    expected = functional.cross_entropy(logits.double(), target, reduction="none")
    torch.testing.assert_close(costs.double(), expected, rtol=1e-6, atol=1e-3)  # a unit of float32 at 1e4


def test_a_value_that_is_not_finite_is_seen() -> None:
    logits = torch.zeros(2, 5, device=DEVICE)
    logits[0, 3] = float("nan")
    costs, _ = cross_entropy.row_costs(logits, torch.tensor([1, 1], device=DEVICE), 0.0)
    assert costs.isnan().tolist() == [True, False]


def test_a_target_beyond_the_classes_makes_the_loss_nan_and_a_narrow_integer_will_do() -> None:
    logits = torch.randn(4, 20, device=DEVICE)
    wrong = torch.tensor([3, 20, -1, IGNORED], device=DEVICE)
    costs, _ = cross_entropy.row_costs(logits, wrong, 0.0)
    assert costs.isnan().tolist() == [False, True, True, False]
    narrow = torch.tensor([3, 7, 0, IGNORED], device=DEVICE, dtype=torch.int32)
    for smoothing in (0.0, 0.1):
        costs, _ = cross_entropy.row_costs(logits, narrow, smoothing)
        expected = functional.cross_entropy(logits, narrow.long(), reduction="none", label_smoothing=smoothing)
        torch.testing.assert_close(costs, expected, rtol=1e-5, atol=1e-6)


def test_no_row_costs_nothing() -> None:
    assert cross_entropy.row_costs(torch.zeros(0, 5, device=DEVICE), torch.zeros(0, device=DEVICE).long(), 0.0)[
        0
    ].shape == (0,)
    assert CrossEntropy()(torch.zeros(0, 5, device=DEVICE), torch.zeros(0, device=DEVICE).long()) == 0.0


@pytest.mark.parametrize("classes", [1, 16, 4096, 4097])
def test_rows_of_every_kind_are_tried_once_and_found_right(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_TRIED", {})
    state = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert cross_entropy.kernels_work(torch.zeros(2, classes, device=DEVICE, dtype=dtype))
    assert len(cross_entropy._TRIED) == 3
    assert torch.equal(torch.get_rng_state(), state), "a trial draws no random number"


@pytest.mark.parametrize("fault", ["raises", "is wrong", "is wrong backward"])
def test_kernels_that_do_not_work_are_left_for_torchs_own_and_that_is_said_once(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, gradient = cross_entropy.row_costs, cross_entropy.row_gradient

    def broken(*arguments: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("no such instruction\nand a page of code")
        return costs(*arguments)[0] + 0.01, costs(*arguments)[1]

    monkeypatch.setattr(cross_entropy, "_TRIED", {})
    if fault == "is wrong backward":
        monkeypatch.setattr(cross_entropy, "row_gradient", lambda *arguments: gradient(*arguments) * 1.1)
    else:
        monkeypatch.setattr(cross_entropy, "row_costs", broken)
    logits = torch.randn(5, 33, device=DEVICE).bfloat16().requires_grad_()
    target = torch.tensor([1, 2, IGNORED, 0, 32], device=DEVICE)
    with pytest.warns(UserWarning, match="torch's own is used") as told:
        loss = CrossEntropy()(logits, target)
    assert ("no such instruction)" in str(told[0].message)) == (fault == "raises")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = CrossEntropy()(logits, target)
    assert loss == again
    expected, _ = exact(logits, target, 0.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def test_kernels_and_their_twin_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 300, device=DEVICE)
    target = torch.tensor([1, 299, IGNORED, 0, 7, 7], device=DEVICE)
    slope = torch.tensor(0.25, device=DEVICE)
    costs, spread = cross_entropy.row_costs(logits, target, 0.2)
    gradient = cross_entropy.row_gradient(logits, target, spread, slope, 0.2)
    monkeypatch.setattr(cross_entropy, "why_not_triton", lambda tensor: "asked for the twin")
    twin_costs, twin_spread = cross_entropy.row_costs(logits, target, 0.2)
    torch.testing.assert_close(costs, twin_costs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(spread, twin_spread, rtol=1e-6, atol=0)
    twin = cross_entropy.row_gradient(logits, target, spread, slope, 0.2)
    torch.testing.assert_close(gradient, twin, rtol=1e-5, atol=1e-7)
