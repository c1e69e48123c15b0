"""The part of a configuration that says how gradients travel; `bigstep.config` exports it with the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bigstep.errors import require, require_positive

__all__ = ["ExchangeConfig"]


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """How gradients travel between ranks: a collective and a codec."""

    collective: Literal["ring", "hierarchical", "torus", "halving", "gather"] = "ring"
    """ring (the backend's own), hierarchical, torus, halving, or gather for codes that cannot be summed."""
    codec: Literal["none", "fp16", "bf16", "onebit", "powersgd"] = "none"
    """How a gradient is written on the wire."""
    grid: Literal["auto"] | tuple[int, ...] = "auto"
    """The torus as [X, Y]; auto takes it from nodes and ranks."""
    bucket_mb: Literal["auto"] | float = 4.0
    """Gradients are grouped until a group holds this many megabytes; auto tries sizes in the first steps."""
    warmup_steps: int = 0
    """Dense steps before the first quantised one."""
    double_buffer: bool = False
    """Exchange one half of the batch while the next is computed on weights half a batch old (onebit)."""
    error_feedback: bool = True
    """Carry what a lossy codec lost into the next step."""
    rank: int = 2
    """Rank of the approximation (powersgd)."""

    def __post_init__(self) -> None:
        require(
            (self.codec == "onebit") == (self.collective == "gather"),
            "1-bit codes cannot be summed on the wire and the owner-per-slice exchange carries nothing else: use "
            f"collective=gather with codec=onebit, and only there (got collective={self.collective}, "
            f"codec={self.codec}).",
        )
        require(
            self.codec != "powersgd" or self.collective == "ring",
            f"powersgd brings its own all-reduce: use collective=ring (got {self.collective}).",
        )
        require(
            self.grid == "auto" or (len(self.grid) == 2 and min(self.grid) > 0),
            f"exchange.grid is {self.grid}, but it must be auto or two positive numbers [X, Y].",
        )
        if self.bucket_mb != "auto":
            require_positive(self.bucket_mb, "exchange.bucket_mb")
        require(
            self.warmup_steps >= 0,
            f"exchange.warmup_steps is {self.warmup_steps}, but it must not be negative.",
        )
        require(
            not self.double_buffer or self.codec == "onebit",
            f"exchange.double_buffer goes with codec=onebit (got {self.codec}).",
        )
        require_positive(self.rank, "exchange.rank")
