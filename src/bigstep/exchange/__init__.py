"""Gradients between ranks: collectives, codecs, residuals, and the hook that puts them under any DDP model."""

from __future__ import annotations

from bigstep.exchange.buckets import BucketTuner
from bigstep.exchange.collectives import Collective, Halving, Hierarchical, Hybrid, Ring, Torus, sum_over_ranks
from bigstep.exchange.hook import Exchange
from bigstep.exchange.residuals import sum_owed
from bigstep.exchange.world import World

__all__ = [
    "BucketTuner",
    "Collective",
    "Exchange",
    "Halving",
    "Hierarchical",
    "Hybrid",
    "Ring",
    "Torus",
    "World",
    "sum_over_ranks",
    "sum_owed",
]
