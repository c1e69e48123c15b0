"""The cross-entropy of each row of logits and its gradient, without a float32 copy of them all.

With logits x, target t, V classes and smoothing s a row costs log sum exp(x) - (1 - s) x[t] - s mean(x), and its
gradient is softmax(x) - (1 - s) [t] - s / V. On a CUDA device two kernels read the logits once each; elsewhere their
twin widens some rows at a time. What waits for the backward pass is the logits themselves and one number a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigstep.gpu.backend import why_not_triton

__all__ = ["IGNORED", "row_costs", "row_gradient"]

IGNORED = -100
"""The target that is not counted: the padding of a sequence."""
CHUNK = 2**24
"""Logits that the twin widens at a time: 64 MB in float32."""
BLOCK, WARPS = 4096, 8
"""Logits of a row that a program holds at once, and the warps that share them."""


def row_costs(rows: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return what each row costs and its log sum exp(x), in float32.

    >>> costs, _ = row_costs(torch.zeros(2, 8), torch.tensor([3, IGNORED]), 0.0)
    >>> costs.exp()
    tensor([8., 1.])
    """
    spread = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    costs = torch.empty_like(spread)
    if why_not_triton(rows) is None:
        from bigstep.gpu.cross_entropy_triton import cost_kernel

        cost_kernel[(len(rows),)](
            rows, target, costs, spread, rows.shape[1], smoothing,
            SMOOTHED=smoothing > 0, IGNORED=IGNORED, B=_block(rows.shape[1]), num_warps=WARPS,
        )  # fmt: skip
        return costs, spread
    index = target.clamp(min=0).unsqueeze(1)
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
    if why_not_triton(rows) is None:
        from bigstep.gpu.cross_entropy_triton import gradient_kernel

        block = _block(rows.shape[1])
        gradient_kernel[(len(rows), -(-rows.shape[1] // block))](
            rows, target, spread, slope, gradient, rows.shape[1], smoothing, IGNORED=IGNORED, B=block, num_warps=WARPS
        )
        return gradient
    index, counted = target.clamp(min=0).unsqueeze(1), target != IGNORED
    for part in _chunks(rows):
        wide = rows[part].float().sub_(spread[part].unsqueeze(1)).exp_()  # softmax
        if smoothing:
            wide -= smoothing / rows.shape[1]
        wide.scatter_add_(1, index[part], torch.full_like(index[part], smoothing - 1, dtype=torch.float32))
        gradient[part] = wide.mul_((counted[part] * slope).unsqueeze(1))
    return gradient


def _chunks(rows: Tensor) -> list[slice]:
    step = max(1, CHUNK // rows.shape[1])
    return [slice(first, first + step) for first in range(0, len(rows), step)]


def _block(classes: int) -> int:
    """The power of two that holds all classes, up to `BLOCK`."""
    return min(BLOCK, 1 << max(4, (classes - 1).bit_length()))
