"""Cross-entropy as a mean over what is counted: one target a sample for images, one a token for text.

With logits x, target t, V classes and smoothing s, a counted target costs

    log sum exp(x) - (1 - s) x[t] - s mean(x)

and the loss is the mean over all targets that are not `IGNORED`, in whichever sample they stand. It is 0 where none is
counted.

Reference: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015, section 7 (smoothing).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["IGNORED", "CrossEntropy", "count_targets"]

IGNORED = -100
"""The target that is not counted: the padding of a sequence."""
CHUNK = 2**24
"""Logits of half precision that are widened at a time: 64 MB in float32."""


def count_targets(target: Tensor) -> Tensor:
    """Return how many targets are counted, as a tensor on their device.

    >>> count_targets(torch.tensor([[3, 1], [2, IGNORED]])).item()
    3
    """
    return (target != IGNORED).sum()


class CrossEntropy(nn.Module):
    """The mean cross-entropy of logits (..., classes) and targets (...).

    Args:
        label_smoothing: Share of each target that is spread over all classes.

    >>> logits, target = torch.zeros(2, 3, 8), torch.tensor([[1, 2, 3], [4, IGNORED, IGNORED]])
    >>> round(CrossEntropy()(logits, target).exp().item(), 4)
    8.0
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean over counted targets, in float32 or better."""
        rows, target = logits.flatten(0, -2), target.flatten()
        # a compiler fuses the plain form, and would unroll the pieces of the lean one
        if rows.dtype in (torch.float16, torch.bfloat16) and not torch.compiler.is_compiling():
            total = _Lean.apply(rows, target, self.label_smoothing)  # type: ignore[no-untyped-call]  # untyped in torch
        else:
            total = functional.cross_entropy(
                rows, target, ignore_index=IGNORED, label_smoothing=self.label_smoothing, reduction="sum"
            )
        mean: Tensor = total / count_targets(target).clamp(min=1)
        return mean


class _Lean(torch.autograd.Function):
    """The sum for logits in half precision: widened some rows at a time, so that float32 copies never stand at once.

    What waits for the backward pass is the logits themselves and one number a row; their gradient has their precision.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
        counted = target != IGNORED
        index = target.clamp(min=0).unsqueeze(1)
        spread = torch.empty(len(rows), dtype=torch.float32, device=rows.device)  # log sum exp(x)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        for part in _chunks(rows):
            wide = rows[part].float()
            spread[part] = wide.logsumexp(1)
            costs = spread[part] - (1 - smoothing) * wide.gather(1, index[part]).squeeze(1)
            if smoothing:
                costs -= smoothing * wide.mean(1)
            total += costs.masked_fill_(~counted[part], 0.0).sum()
        ctx.save_for_backward(rows, index, counted, spread)
        ctx.smoothing = smoothing
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        rows, index, counted, spread = ctx.saved_tensors
        gradient = torch.empty_like(rows)
        for part in _chunks(rows):
            wide = rows[part].float().sub_(spread[part].unsqueeze(1)).exp_()  # softmax
            if ctx.smoothing:
                wide -= ctx.smoothing / rows.shape[1]
            ones = torch.full_like(index[part], ctx.smoothing - 1, dtype=torch.float32)
            wide.scatter_add_(1, index[part], ones)
            gradient[part] = wide.mul_((counted[part] * slopes[0]).unsqueeze(1))
        return gradient, None, None


def _chunks(rows: Tensor) -> list[slice]:
    step = max(1, CHUNK // rows.shape[1])
    return [slice(first, first + step) for first in range(0, len(rows), step)]
