"""Epoch -> number: learning rates, blends and batches as pure functions of the amount of data seen.

A schedule is any callable that takes an absolute epoch (a float: samples seen / size of the training set) and returns
a number. Counting in epochs, not in steps or calls, keeps a schedule right when the batch, the number of ranks or the
gradient accumulation changes. Every schedule here keeps its first value before it begins and its last value after it
ends, so pieces can be joined without gaps.
"""

from __future__ import annotations

from bigstep.schedules.plans import BatchPlan, BatchStage, Plan
from bigstep.schedules.rules import momentum_correction, scale_lr
from bigstep.schedules.shapes import (
    Schedule,
    constant,
    cosine,
    elu_blend,
    join,
    linear,
    polynomial,
    slow_start,
    step_decay,
    table,
    warmup,
)

__all__ = [
    "BatchPlan", "BatchStage", "Plan", "Schedule", "constant", "cosine", "elu_blend", "join", "linear",
    "momentum_correction", "polynomial", "scale_lr", "slow_start", "step_decay", "table", "warmup",
]  # fmt: skip
