"""Gradients between ranks: collectives, codecs, error feedback, and the hook that puts them under any DDP model."""

from __future__ import annotations

from bigstep.comm.buckets import BucketTuner
from bigstep.comm.collectives import Collective, Halving, Hierarchical, Ring, Torus, sum_over_ranks
from bigstep.comm.hook import Exchange
from bigstep.comm.world import World

__all__ = [
    "BucketTuner",
    "Collective",
    "Exchange",
    "Halving",
    "Hierarchical",
    "Ring",
    "Torus",
    "World",
    "sum_over_ranks",
]
