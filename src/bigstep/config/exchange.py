"""The part of a configuration that says how gradients travel between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from bigstep.tables.codecs import SETTING_RANGES, check_pair
from bigstep.validate import Count, Positive, Range, WholeNotNegative, check_ranges

__all__ = ["ExchangeConfig"]

Grid = Annotated[
    tuple[int, ...],
    Range(lambda grid: len(grid) == 2 and min(grid) > 0, "be auto or two positive numbers [X, Y]"),
]
Kept = Annotated[int, SETTING_RANGES["keep"]]
Decay = Annotated[float, SETTING_RANGES["decay"]]


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """How gradients travel between ranks: a collective and a codec."""

    collective: str = "ring"
    """How gradients are summed, one of {collectives}; gather is for codes that cannot be summed."""
    codec: str = "none"
    """How a gradient is written on the wire, one of {codecs}."""
    grid: Literal["auto"] | Grid = "auto"
    """The torus as [X, Y]; auto derives it from nodes and ranks."""
    bucket_mb: Literal["auto"] | Positive = 4.0
    """Gradients are grouped until a group holds this many megabytes; auto tries sizes in the first steps."""
    warmup_steps: WholeNotNegative = 0
    """Uncompressed steps at the start, for codecs that carry what they lose."""
    double_buffer: bool = False
    """Apply each gradient one step late: it travels while the next step is computed."""
    error_feedback: bool = True
    """Carry what a lossy codec lost into the next step."""
    rank: Count = 2
    """Rank of the approximation (powersgd)."""
    keep: Kept = 64
    """How many of 4,096 values are sent (topk)."""
    decay: Decay = 0.95
    """Factor on what is carried over, in each step (topk)."""

    def __post_init__(self) -> None:
        check_ranges(self, "exchange")
        check_pair(self.collective, self.codec, double_buffer=self.double_buffer)
