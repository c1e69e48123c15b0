"""Batch norm between processes: each forward uses the statistics of its own share, the moving averages are shared.

average <- keep * average + (1 - keep) * (mean, variance) of a share, once per update.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bigstep.engine.learner import Learner
from bigstep.norm.statistics import copy_out, statistics_of, tracking_norms

__all__ = ["batch_statistics", "set_averages"]


def batch_statistics(model: nn.Module) -> Tensor:
    """Return the buffers of the batch norms as one flat tensor: after a gradient, the statistics of its last share.

    >>> batch_statistics(nn.BatchNorm1d(2))
    tensor([0., 0., 1., 1.])
    """
    buffers = statistics_of(tracking_norms(model))
    return torch.cat(buffers) if buffers else torch.zeros(0)


def set_averages(learner: Learner, averages: Tensor) -> None:
    """Make an evaluation use these averages."""
    copy_out(averages, statistics_of(tracking_norms(learner.model)))
    learner.statistics.restart()
