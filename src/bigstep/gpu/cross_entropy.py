"""The cross-entropy of each row of logits and its gradient, without a float32 copy of all logits.

With logits x, target t, V classes and smoothing s a row costs log sum exp(x) - (1 - s) x[t] - s mean(x), and its
gradient is softmax(x) - (1 - s) [t] - s / V. On a CUDA device two kernels read the logits once each; elsewhere their
twin converts a few rows at a time to float32. Only the logits and one number per row are kept for the backward pass.

Before the kernels are used on a device, `kernels_work` runs them there once on a few rows and compares them with torch.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional

from bigstep.gpu.backend import on_device_of, why_not_triton

__all__ = ["IGNORED", "is_counted", "kernels_work", "row_costs", "row_gradient"]

IGNORED = -100
"""The target that does not count, such as padding of a sequence."""
CHUNK = 2**24
"""Logits that the twin converts at a time: 64 MB in float32."""
BLOCK, PER_WARP = 4096, 512
"""Logits of a row that a program holds at once, and how many of these each warp has."""
_TRIED: dict[tuple[torch.device, torch.dtype, int, bool], bool] = {}
"""Whether the kernels work, by what they are compiled for: device, type, block, and whether V is a multiple of 16."""


def is_counted(target: Tensor) -> Tensor:
    """Tell which targets count. Those of an unsigned type all do: torch would find a byte of 156 equal to -100.

    >>> is_counted(torch.tensor([3, IGNORED])).tolist(), is_counted(torch.tensor([3, 156], dtype=torch.uint8)).tolist()
    ([True, False], [True, True])
    """
    return target != IGNORED if target.dtype.is_signed else torch.ones_like(target, dtype=torch.bool)


def kernels_work(rows: Tensor) -> bool:
    """Whether the kernels can be used for such rows; they are tried once, and a failure is reported once.

    >>> kernels_work(torch.zeros(2, 8))
    False
    """
    if why_not_triton(rows) is not None or not len(rows):
        return False
    key = rows.device, rows.dtype, _block(rows.shape[1]), rows.shape[1] % 16 == 0
    if key not in _TRIED:
        if rows.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # a trial reads its result on the host, which a capture forbids
        trouble = _try(rows)
        _TRIED[key] = trouble is None
        if trouble is not None:
            warnings.warn(
                f"The kernels of the cross-entropy do not work on {rows.device} ({trouble:.300}); torch's own is used, "
                "which makes a float32 copy of the logits.",
                stacklevel=3,
            )
    return _TRIED[key]


@torch.no_grad()
def _try(like: Tensor) -> str | None:
    """Run both kernels on three fixed rows; return what is wrong with them, or None."""
    classes = like.shape[1]
    numbers = torch.arange(3 * classes, device=like.device, dtype=torch.int64)
    rows = ((numbers * 7919 % 1021).float() / 128 - 4).view(3, classes).to(like.dtype)
    target = torch.tensor([classes - 1, IGNORED, 0], device=like.device)
    slope, smoothing = torch.full((), 0.5, device=like.device), 0.1
    try:
        costs, spread = row_costs(rows, target, smoothing)
        gradient = row_gradient(rows, target, spread, slope, smoothing)
        wide, smooth = rows.double(), smoothing / classes
        expected = functional.cross_entropy(
            wide, target, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
        )
        exact = wide.softmax(1) - smooth - (1 - smoothing) * functional.one_hot(target.clamp(min=0), classes)
        exact *= 0.5 * (target != IGNORED).unsqueeze(1)
        off = float((costs.double() - expected).abs().max()), float((gradient.double() - exact).abs().max())
    except Exception as error:  # compiler, driver and launcher raise all kinds
        return f"{type(error).__name__}: {error}".splitlines()[0]
    # costs are near 10, where float32 is spaced by 1e-6; a gradient is at most 0.5, rounded to the logits' precision
    if off[0] < 1e-3 and off[1] < torch.finfo(like.dtype).eps + 1e-5:
        return None
    return f"they are off by {off[0]:.2g} and {off[1]:.2g}"


def row_costs(rows: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the cost of each row and its log sum exp(x), in float32.

    >>> costs, _ = row_costs(torch.zeros(2, 8), torch.tensor([3, IGNORED]), 0.0)
    >>> costs.exp()
    tensor([8., 1.])
    """
    spread = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    costs = torch.empty_like(spread)
    if why_not_triton(rows) is None and len(rows):
        from bigstep.gpu.cross_entropy_triton import cost_kernel

        block = _block(rows.shape[1])
        with on_device_of(rows):
            cost_kernel[(len(rows),)](
                rows, target, costs, spread, rows.shape[1], float(smoothing),
                SMOOTHED=smoothing > 0, IGNORED=IGNORED, B=block, num_warps=_warps(block),
            )  # fmt: skip
        return costs, spread
    index = target.masked_fill(target == IGNORED, 0).unsqueeze(1)  # other negative targets still raise in torch
    for part in _chunks(rows):
        wide = rows[part].float()
        spread[part] = wide.logsumexp(1)
        costs[part] = spread[part] - (1 - smoothing) * wide.gather(1, index[part]).squeeze(1)
        if smoothing:
            costs[part] -= smoothing * wide.mean(1)
    return costs.masked_fill_(target == IGNORED, 0.0), spread


def row_gradient(rows: Tensor, target: Tensor, spread: Tensor, slope: Tensor, smoothing: float) -> Tensor:
    """Return the gradient of `slope` times the sum of all costs, in the precision of the logits."""
    gradient = torch.empty_like(rows)
    if why_not_triton(rows) is None and len(rows):
        from bigstep.gpu.cross_entropy_triton import gradient_kernel

        block = _block(rows.shape[1])
        with on_device_of(rows):
            gradient_kernel[(len(rows), -(-rows.shape[1] // block))](
                rows, target, spread, slope, gradient, rows.shape[1], float(smoothing),
                IGNORED=IGNORED, B=block, num_warps=_warps(block),
            )  # fmt: skip
        return gradient
    index, counted = target.clamp(min=0).unsqueeze(1), target != IGNORED
    for part in _chunks(rows):
        wide = rows[part].float().sub_(spread[part].unsqueeze(1)).exp_()  # softmax
        if smoothing:
            wide -= smoothing / rows.shape[1]
        wide.scatter_add_(1, index[part], torch.full_like(index[part], smoothing - 1, dtype=torch.float32))
        gradient[part] = wide.mul_((counted[part] * slope).unsqueeze(1))
    return gradient


def _warps(block: int) -> int:
    return max(1, min(8, block // PER_WARP))


def _chunks(rows: Tensor) -> list[slice]:
    step = max(1, CHUNK // rows.shape[1])
    return [slice(first, first + step) for first in range(0, len(rows), step)]


def _block(classes: int) -> int:
    """The smallest power of two that holds all classes, from 16 to `BLOCK`."""
    return min(BLOCK, 1 << max(4, (classes - 1).bit_length()))
