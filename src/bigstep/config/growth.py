"""The part of a configuration that says how the batch follows the gradient noise scale (plan: auto)."""

from __future__ import annotations

from dataclasses import dataclass

from bigstep.validate import Count, Positive, check_ranges

__all__ = ["GrowthConfig"]


@dataclass(frozen=True, kw_only=True)
class GrowthConfig:
    """How `plan: auto` lets the batch grow; any other plan ignores these settings."""

    most: Count = 16
    """The largest batch, as a multiple of the first; the batch grows by doubling the workers, and never shrinks."""
    scales: Positive = 1.0
    """The batch is doubled as long as the doubled batch is at most this many gradient noise scales."""
    every: Positive = 1.0
    """Epochs between two decisions, each of which doubles the batch at most once."""
    measured: Count = 5
    """Steps between two measurements of the noise scale."""

    def __post_init__(self) -> None:
        check_ranges(self, "growth")
