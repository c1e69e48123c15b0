"""What runs are ranked by: accuracy for images, bits per byte for text, the loss for tokens of unknown length.

Everything that a report says about a result goes through a measure: which direction is better, how a figure and a
difference of two are written, and what counts as near.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bigstep.report.outcome import Outcome

__all__ = ["ACCURACY", "BITS_PER_BYTE", "LOSS", "Measure", "measure_of"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One figure of an evaluation, and how people read it."""

    key: str
    """Its name in the rows of an evaluation."""
    name: str
    axis: str
    falls: bool
    """Whether less is better."""
    scale: float = 1.0
    """What a chart multiplies it by."""
    digits: int
    unit: str = ""
    """Written after a figure that stands without its name."""
    of_gap: str
    """Written after a difference of two figures."""
    far: float
    """A summary lists the groups that are further than this behind the best."""
    near: float
    """A chart shows results up to this far from the best; those further off get a mark at the edge."""
    step: float
    """A target is a multiple of this."""

    def cell(self, value: float | None) -> str:
        """Write a figure whose name stands beside it.

        >>> ACCURACY.cell(0.8835), BITS_PER_BYTE.cell(2.5114), LOSS.cell(None)
        ('88.35 %', '2.511', '–')
        """
        return "–" if value is None else f"{self.scale * value:.{self.digits}f}{' %' if self.scale == 100 else ''}"

    def text(self, value: float | None) -> str:
        """Write a figure that stands without its name.

        >>> ACCURACY.text(0.8835), BITS_PER_BYTE.text(2.5114), LOSS.text(0.25)
        ('88.35 %', '2.511 bits per byte', 'a loss of 0.2500')
        """
        return f"a loss of {self.cell(value)}" if self.key == "eval_loss" else f"{self.cell(value)}{self.unit}"

    def goal(self, target: float) -> str:
        """Write a target.

        >>> ACCURACY.goal(0.87), BITS_PER_BYTE.goal(2.55)
        ('87 %', '2.55 bits per byte')
        """
        return f"{self.scale * target:g}{' %' if self.scale == 100 else self.unit}"

    def gap(self, difference: float) -> str:
        """Write a difference of two figures.

        >>> ACCURACY.gap(0.0123), BITS_PER_BYTE.gap(-0.0123)
        ('1.23 points', '0.012 bits')
        """
        return f"{self.plain_gap(abs(difference))}{self.of_gap}"

    def plain_gap(self, difference: float) -> str:
        """The same without a unit, and with a sign where it is negative."""
        return f"{self.scale * difference:.{self.digits}f}"

    def gain(self, value: float, other: float) -> float:
        """By how much a figure is better than another.

        >>> ACCURACY.gain(0.9, 0.5), BITS_PER_BYTE.gain(3.0, 2.0)
        (0.4, -1.0)
        """
        return other - value if self.falls else value - other

    def best(self, values: Sequence[float]) -> float:
        """Return the best of some figures."""
        return min(values) if self.falls else max(values)

    def worst(self, values: Sequence[float]) -> float:
        """Return the worst of some figures."""
        return max(values) if self.falls else min(values)

    def reaches(self, value: float, target: float) -> bool:
        """Whether a figure is as good as a target."""
        return self.gain(value, target) >= 0

    def target_below(self, best: float) -> float:
        """Return a round figure that is one to two steps worse than the best.

        >>> ACCURACY.target_below(0.8835), BITS_PER_BYTE.target_below(2.511), LOSS.target_below(0.2)
        (0.87, 2.6, 0.25)
        """
        if self.falls:
            return round(math.ceil(best / self.step + 1 - 1e-9) * self.step, 9)
        return round(max(1, math.floor(best / self.step - 1 + 1e-9)) * self.step, 9)


ACCURACY = Measure(
    key="accuracy", name="accuracy", axis="accuracy (%)", falls=False, scale=100.0, digits=2, of_gap=" points",
    far=0.05, near=0.15, step=0.01,
)  # fmt: skip
BITS_PER_BYTE = Measure(
    key="bits_per_byte", name="bits per byte", axis="bits per byte", falls=True, digits=3, unit=" bits per byte",
    of_gap=" bits", far=0.5, near=1.5, step=0.05,
)  # fmt: skip
LOSS = Measure(
    key="eval_loss", name="loss", axis="loss on held-out data", falls=True, digits=4, of_gap="", far=0.5, near=1.5,
    step=0.05,
)  # fmt: skip


def measure_of(outcomes: Sequence[Outcome]) -> Measure:
    """Return the measure by which all of some runs can be ranked.

    Losses are compared among sequences only: for other data, the records do not show whether the tasks are the same.
    """
    known = [outcome for outcome in outcomes if outcome.evaluations or outcome.eval_loss is not None] or list(outcomes)
    if all(outcome.bits_per_byte is not None for outcome in known):
        return BITS_PER_BYTE
    if all(outcome.length is not None for outcome in known):
        return LOSS
    return ACCURACY
