"""Treatments of batch norm: which statistics count, how they are averaged, how residual branches start."""

from __future__ import annotations

from bigstep.norm.exact_statistics import ExactStatistics
from bigstep.norm.ghost import GhostBatchNorm2d, ghost_batch_norm, set_workers
from bigstep.norm.statistics import average_statistics, last_batch_statistics, other_buffers
from bigstep.norm.worker_statistics import WorkerStatistics
from bigstep.norm.zero_gamma import zero_gamma

__all__ = [
    "ExactStatistics",
    "GhostBatchNorm2d",
    "WorkerStatistics",
    "average_statistics",
    "ghost_batch_norm",
    "last_batch_statistics",
    "other_buffers",
    "set_workers",
    "zero_gamma",
]
