"""The 2x2 max-pooling kernels against torch's own, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it

from bigstep.gpu import backend
from bigstep.gpu.max_pool import max_pool2
from interpreter import DEVICE, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 8, 4, 6), (3, 72, 5, 7), (1, 64, 2, 3), (2, 16, 3, 2)])
def test_pooling_and_its_gradient_are_torchs_own(shape, dtype, monkeypatch) -> None:
    monkeypatch.setattr(backend, "INTERPRET", True)
    generator = torch.Generator().manual_seed(1)
    # few different values, so that windows have ties
    values = torch.randint(-3, 3, shape, generator=generator).to(DEVICE, dtype)
    values = values.to(memory_format=torch.channels_last)
    gradient = torch.randn(F.max_pool2d(values.float(), 2).shape, generator=generator).to(DEVICE, dtype)
    ours, theirs = (values.clone(memory_format=torch.channels_last).requires_grad_() for _ in range(2))
    y = max_pool2(ours)
    assert type(y.grad_fn).__name__ == "_MaxPool2Backward"  # the kernels ran, not their twin
    want = F.max_pool2d(theirs, 2)
    assert torch.equal(y, want)
    y.backward(gradient)
    want.backward(gradient)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_window_with_what_is_no_number_gives_none(place: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INTERPRET", True)
    x = torch.randn(1, 8, 4, 4, device=DEVICE).to(memory_format=torch.channels_last)
    x[0, 2, place[0], place[1]] = float("nan")
    assert torch.equal(max_pool2(x).isnan(), F.max_pool2d(x, 2).isnan())
    assert max_pool2(x)[0, 2, 0, 0].isnan()


def test_other_tensors_take_torchs_own() -> None:
    x = torch.randn(2, 3, 5, 5, device=DEVICE, requires_grad=True)
    assert torch.equal(max_pool2(x), F.max_pool2d(x, 2))
