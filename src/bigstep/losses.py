"""Cross-entropy as a mean over the counted targets: one per sample for images, one per token for text.

With logits x, target t, V classes and smoothing s, a counted target costs

    log sum exp(x) - (1 - s) x[t] - s mean(x)

and the loss is the mean over all targets that are not `IGNORED`, whichever samples they belong to. It is 0 if there are
none.

Reference: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015, section 7 (smoothing).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bigstep.gpu.cross_entropy import IGNORED, is_counted, kernels_work, row_costs, row_gradient

__all__ = ["IGNORED", "CrossEntropy", "SampleCrossEntropy", "count_targets"]


_HALF = (torch.float16, torch.bfloat16)


def count_targets(target: Tensor) -> Tensor:
    """Return the number of targets that are not `IGNORED`, as a tensor on their device.

    >>> count_targets(torch.tensor([[3, 1], [2, IGNORED]])).item()
    3
    """
    return is_counted(target).sum()


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
        rows, target = logits.flatten(0, -2), _whole(target).flatten()
        if _takes_rows(rows):
            total = _RowSum.apply(rows.contiguous(), target.contiguous(), self.label_smoothing)  # type: ignore[no-untyped-call]
        else:
            wide = rows.float() if rows.dtype in _HALF else rows
            total = functional.cross_entropy(
                wide, target, ignore_index=IGNORED, label_smoothing=self.label_smoothing, reduction="sum"
            )
        mean: Tensor = total / count_targets(target).clamp(min=1)
        return mean


class SampleCrossEntropy(nn.CrossEntropyLoss):
    """Torch's cross-entropy with one target per sample, in float32 or better.

    With label smoothing, torch computes the logarithms in the precision of the logits, even under autocast: in bf16,
    ten equal logits cost 2.2969 instead of 2.3026.

    >>> SampleCrossEntropy(label_smoothing=0.1)(torch.zeros(1, 10, dtype=torch.bfloat16), torch.tensor([3]))
    tensor(2.3026)
    """

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the samples."""
        return super().forward(logits.float() if logits.dtype in _HALF else logits, _whole(target))


def _whole(target: Tensor) -> Tensor:
    """Class numbers as int64, the type that torch's loss takes; probabilities unchanged."""
    return target if target.is_floating_point() else target.long()


def _takes_rows(rows: Tensor) -> bool:
    """Whether to use our kernels, or their CPU twin, which widens half-precision logits some rows at a time."""
    if torch.compiler.is_compiling() or rows.dtype not in (*_HALF, torch.float32):
        return False  # a compiler fuses the plain form by itself
    return kernels_work(rows) or (rows.device.type == "cpu" and rows.dtype in _HALF)


class _RowSum(torch.autograd.Function):
    """The sum of the rows' costs; the gradient has the precision of the logits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, target: Tensor, smoothing: float) -> Tensor:
        costs, spread = row_costs(rows, target, smoothing)
        ctx.save_for_backward(rows, target, spread)
        ctx.smoothing = smoothing
        return costs.sum()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        rows, target, spread = ctx.saved_tensors
        return row_gradient(rows, target, spread, slopes[0], ctx.smoothing), None, None
