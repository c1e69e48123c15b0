"""Batch plans: how many workers and which local batch apply at an epoch."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Protocol

from bigstep.errors import require

__all__ = ["BatchPlan", "BatchStage", "Plan"]


@dataclass(frozen=True)
class BatchStage:
    """From `epoch` on, this many workers, each with this local batch.

    >>> BatchStage(epoch=0, workers=2176, local_batch=16).batch
    34816
    """

    epoch: float
    """First epoch of the stage."""
    workers: int
    """Logical workers that take part."""
    local_batch: int
    """Samples of one worker in one step."""

    def __post_init__(self) -> None:
        require(
            self.workers > 0 and self.local_batch > 0,
            f"A batch stage needs at least one worker and one sample each, but has {self.workers} workers "
            f"with {self.local_batch} samples.",
        )

    @property
    def batch(self) -> int:
        """The global batch: workers x local batch."""
        return self.workers * self.local_batch


class Plan(Protocol):
    """Tells how many workers and which local batch apply at an epoch."""

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """The stages known so far, by rising epoch."""

    def at(self, epoch: float) -> BatchStage:
        """The stage that applies at `epoch`."""


@dataclass(frozen=True)
class BatchPlan:
    """Batch-size control: how many workers and which local batch apply at an epoch.

    Args:
        stages: Stages by rising epoch; the first begins at epoch 0, and each lasts until the next begins.

    >>> plan = BatchPlan((BatchStage(0, 2176, 16), BatchStage(30, 2176, 32)))
    >>> plan.at(29.9).batch, plan.at(30.0).batch, plan.largest.batch
    (34816, 69632, 69632)

    Reference: Mikami et al., Massively Distributed SGD, 2018 (batch-size control); Smith et al., Don't Decay the
    Learning Rate, Increase the Batch Size, 2017.

    Differs from the papers: the learning rate is not part of a plan; `bigstep.config.LrConfig.follow_plan` says whether
    it follows the batch.
    """

    stages: tuple[BatchStage, ...]

    def __post_init__(self) -> None:
        epochs = [stage.epoch for stage in self.stages]
        require(
            epochs[:1] == [0] and epochs == sorted(set(epochs)),
            f"The stages of a batch plan must begin at epoch 0 and rise, but they begin at {epochs}.",
        )

    def at(self, epoch: float) -> BatchStage:
        """The stage that applies at `epoch`."""
        after = bisect.bisect_right(self.stages, epoch, key=lambda stage: stage.epoch)
        return self.stages[max(after - 1, 0)]

    @property
    def largest(self) -> BatchStage:
        """The stage with the largest global batch; of equals the first."""
        return max(self.stages, key=lambda stage: stage.batch)
