"""Gradients between ranks, under the name that version 0.1 gave them; the code lives in `bigstep.exchange`."""

from __future__ import annotations

from bigstep.exchange import (
    BucketTuner,
    Collective,
    Exchange,
    Halving,
    Hierarchical,
    Ring,
    Torus,
    World,
    sum_over_ranks,
)

__all__ = [
    "BucketTuner", "Collective", "Exchange", "Halving", "Hierarchical", "Ring", "Torus", "World", "sum_over_ranks",
]  # fmt: skip
