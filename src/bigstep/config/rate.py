"""The part of a configuration that gives the learning rate at each epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from bigstep.errors import require
from bigstep.tables.schedules import SHAPES
from bigstep.validate import Count, NotNegative, Positive, Range, WholeNotNegative, check_ranges, require_name

__all__ = ["LrConfig", "Piece", "RateGroup"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One piece of a schedule; values are multiples of the scaled learning rate.

    Epochs count passes over the data and may be fractions, so they express a schedule in tokens too: a warm-up over
    the first 10 of 500 million tokens ends at epoch 0.02.
    """

    shape: str
    """The curve: one of {shapes}."""
    until: Positive
    """The epoch at which the next piece takes over."""
    start: NotNegative | Literal["base"] = 1.0
    """Value at the beginning; `base` means the rate before scaling by the batch."""
    end: NotNegative = 1.0
    """Value at `until` (warmup, linear, polynomial, cosine)."""
    power: Positive = 2.0
    """Exponent of a polynomial."""
    at: tuple[float, ...] = ()
    """Epochs at which step and table change the rate."""
    factor: NotNegative = 0.1
    """What step multiplies the rate by at each epoch of `at`."""
    values: Annotated[
        tuple[float, ...], Range(lambda values: min(values, default=0) >= 0, "hold no negative number")
    ] = ()
    """The values of a table: one more than there are epochs in `at`."""

    def __post_init__(self) -> None:
        require_name(self.shape, SHAPES, "lr.schedule.shape")
        check_ranges(self, "lr.schedule")
        require(list(self.at) == sorted(set(self.at)), f"lr.schedule.at must rise, but it is {list(self.at)!s:.80}.")
        require(
            self.shape != "table" or len(self.values) == len(self.at) + 1,
            f"A table needs one more value than epochs in lr.schedule.at, but it has {len(self.values)} values "
            f"for {len(self.at)} epochs.",
        )


@dataclass(frozen=True, kw_only=True)
class RateGroup:
    """Parameters whose rate is a multiple of the common one."""

    names: str
    """Pattern of the parameters' names, such as `*embedding*`."""
    factor: Positive
    """What their rate is multiplied by."""

    def __post_init__(self) -> None:
        check_ranges(self, "lr.groups")


@dataclass(frozen=True, kw_only=True)
class LrConfig:
    """The learning rate: base, scaled by the batch, times the schedule."""

    base: Positive
    """The rate at base_batch."""
    scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate grows with the global batch: linearly, with its square root, or not at all."""
    base_batch: Count = 256
    """The batch that `base` is meant for."""
    saturation: WholeNotNegative = 0
    """The batch beyond which the rate no longer grows; 0 for none."""
    beyond: Annotated[float, Range(lambda power: abs(power) <= 4, "be -4 to 4")] = 0.0
    """Power of the batch with which the rate changes beyond `saturation`: -0.33 halves it at eight times that batch."""
    warmup_batch: WholeNotNegative = 0
    """Beyond this batch a first warm-up lasts batch / warmup_batch times as long, up to half the schedule; 0: never."""
    schedule: tuple[Piece, ...] = ()
    """Pieces of the schedule, each until its epoch; empty for a constant rate."""
    follow_plan: bool = False
    """Scale the rate again when the batch plan changes the batch; otherwise growth replaces decay."""
    groups: tuple[RateGroup, ...] = ()
    """Parameters with a rate of their own, as a list of {names, factor}; the first pattern that matches decides."""

    def __post_init__(self) -> None:
        check_ranges(self, "lr")
        require(
            self.beyond == 0 or self.saturation > 0,
            f"lr.beyond is {self.beyond:g}, which begins at lr.saturation, but that is 0: set the batch it begins at.",
        )
        ends = [piece.until for piece in self.schedule]
        require(
            ends == sorted(set(ends)),
            f"The pieces of lr.schedule must follow one another, but they end at {ends}.",
        )
