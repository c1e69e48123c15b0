"""What an evaluation counts: right answers and loss, over samples or over tokens.

Every figure is a sum over the evaluation set and a division at the end, so it does not depend on batches or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bigstep.errors import require
from bigstep.gpu.cross_entropy import is_counted

__all__ = ["RESERVED", "Evaluation", "Metric", "Totals", "count_targets", "on_grid"]

Metric = Callable[[Any, Any], Tensor | float]
"""(output, target) -> a mean over what counts."""
RESERVED = frozenset({
    "kind", "epoch", "step", "samples", "seconds", "loss", "steps", "batch", "workers", "ranks", "weights_sha256",
    "run", "model", "skipped_steps", "noise_scale", "plan", "accuracy_last5",
})  # fmt: skip
"""Names that rows of evaluations and results use in every run, so that no metric of a user's can have them."""
_NEAREST = 5
"""The k of top-k accuracy."""


@dataclass(frozen=True)
class Evaluation:
    """The figures of a pass over the evaluation set; None for those that the outputs do not allow."""

    accuracy: float | None
    """Share of samples, or of tokens, whose highest score is right."""
    loss: float
    """Mean over samples, or over tokens."""
    samples: int
    top5: float | None = None
    bits_per_byte: float | None = None
    more: Mapping[str, float] = field(default_factory=dict)
    """What a user's own metrics gave."""

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss, for text."""
        return math.exp(min(self.loss, 700.0)) if self.bits_per_byte is not None else None

    def facts(self) -> dict[str, Any]:
        """Return the entries of a row of the records."""
        more = {"top5": self.top5, "bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity}
        known = {name: value for name, value in more.items() if value is not None}
        return {"accuracy": self.accuracy, "eval_loss": self.loss, **known, **self.more}


def count_targets(target: Tensor) -> Tensor:
    """Count a batch's targets, on their device: its samples, or its tokens or pixels except for padding.

    >>> some = torch.tensor([3, 1]), torch.tensor([[3, 1, -100]]), torch.ones(4, 2)
    >>> [int(count_targets(target)) for target in some]
    [2, 2, 4]
    """
    if target.is_floating_point():
        return torch.full((), len(target), device=target.device)  # filled there: a copy would wait for the device
    return is_counted(target).sum()


def class_dimension(output: Any, target: Tensor, tokens: bool) -> int | None:
    """Return the class dimension of an output; None if it does not hold scores for such targets.

    It is the last for tokens and the second otherwise, as in the losses, unless only the other one fits.

    >>> pixels = torch.zeros(2, 8, 8, dtype=torch.int64)
    >>> [class_dimension(torch.zeros(shape), pixels, tokens=False) for shape in ((2, 8, 8, 8), (2, 8, 8, 5), (2, 5))]
    [1, 3, None]
    """
    if not isinstance(output, Tensor) or target.is_floating_point() or output.ndim != target.ndim + 1:
        return None
    last, fits = target.ndim, [d for d in (1, target.ndim) if output.shape[:d] + output.shape[d + 1 :] == target.shape]
    return next((d for d in ((last, 1) if tokens else (1, last)) if d in fits), None)


def on_grid(loss: Tensor, digits: int = 44) -> Tensor:
    """Round a loss to multiples of 2^-digits, in float64, so that sums are exact and do not depend on their order.

    That holds up to 2^(53 - digits): 512 for the mean loss of a step, 8 million (30 digits) for the sum over a set.
    Beyond that the last digit of a reported loss may depend on the ranks; weights never do.

    >>> losses = [torch.tensor(value) for value in (0.1, 0.2, 0.3)]
    >>> a, b, c = map(on_grid, losses)
    >>> bool(a + (b + c) == (a + b) + c), bool(0.1 + (0.2 + 0.3) == (0.1 + 0.2) + 0.3)
    (True, False)
    """
    return torch.round(loss.double() * 2.0**digits) * 2.0**-digits


class Totals:
    """Sums over what this rank evaluates."""

    def __init__(self, device: torch.device, metrics: Mapping[str, Metric] | None = None, *, tokens: bool = False):
        """`metrics` are a user's own, by name; `tokens` says that samples are sequences of them."""
        self._metrics, self._tokens = dict(metrics or {}), tokens
        self.sums = torch.zeros(8 + len(self._metrics), dtype=torch.float64, device=device)
        """Samples, targets, loss; targets scored and right, the same for top 5; bytes of text; own metrics.
        Summed over ranks in place."""

    def add(self, output: Any, target: Tensor, loss: Tensor) -> None:
        """Add a batch: output (scores, or other values), target, and the mean loss over the targets that count."""
        sums = self.sums
        counted = count_targets(target)

        def weighed(mean: Tensor | float, what: str) -> Tensor:
            """Return a mean times its targets: 0, not NaN, if there are none. The host does not wait for the device."""
            value = torch.as_tensor(mean, device=sums.device)
            require(
                value.numel() == 1,
                f"{what} gave a tensor of {tuple(value.shape)}, but it must give one number: its mean.",
            )
            return torch.where(counted > 0, on_grid(value.view(()).double() * counted, digits=30), 0.0)

        sums[0] += len(target)
        sums[1] += counted
        sums[2] += weighed(loss, "The loss")
        for index, (name, metric) in enumerate(self._metrics.items(), 8):
            sums[index] += weighed(metric(output, target), f"The metric {name}")
        classes = class_dimension(output, target, self._tokens)
        if classes is None:
            return
        sums[3] += counted
        sums[4] += ((output.argmax(classes) == target) & is_counted(target)).sum()
        if target.ndim == 1 and output.shape[1] > _NEAREST:
            sums[5] += counted
            sums[6] += (output.topk(_NEAREST, dim=1).indices == target[:, None]).sum()

    def add_bytes(self, counts: Tensor | None) -> None:
        """Add the bytes of text that the targets of some samples stand for; None if they are not text."""
        if counts is not None:
            self.sums[7] += float(counts.sum())

    def evaluation(self) -> Evaluation:
        """Divide the sums by their counts."""
        samples, targets, loss, scored, right, scored_near, near, text_bytes, *own = self.sums.tolist()
        loss /= max(targets, 1.0)
        return Evaluation(
            accuracy=right / scored if scored else None,
            loss=loss,
            samples=int(samples),
            top5=near / scored_near if scored_near else None,
            bits_per_byte=loss / math.log(2) * targets / text_bytes if text_bytes else None,
            more={name: value / max(targets, 1.0) for name, value in zip(self._metrics, own, strict=True)},
        )
