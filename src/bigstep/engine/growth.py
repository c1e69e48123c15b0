"""Batch-size control closed into a loop (`plan: auto`): the batch follows the measured gradient noise scale.

At fixed intervals the batch is doubled if twice its size is still within the noise scale, where a step is worth half of
what an infinite batch would give. The decisions form a batch plan like any other, written during the run: given as
`plan` to a second run, it makes that run take the same path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigstep.config import GrowthConfig
from bigstep.engine.meter import Flush
from bigstep.engine.methods.base import Note
from bigstep.engine.observers.noise import NoiseScale
from bigstep.schedules import BatchPlan, BatchStage

__all__ = ["Growth"]

DECAY = 0.9
"""Of the running means, per measurement: only about the last ten count, since the scale grows as the loss falls."""
SETTLED = 3
"""Measurements before the first decision."""


class Growth:
    """The stages that are decided so far, and the noise scale that decides on the next.

    Decisions depend on sums over ranks that are the same on all of them, taken in steps and at epochs that do not
    depend on the ranks; what a run on another number of ranks measures differs by the rounding of those sums.

    Args:
        config: Bounds and intervals.
        first: The stage that a run begins with.
        samples: Size of the training set, which no batch exceeds.

    >>> growth = Growth(GrowthConfig(most=4), BatchStage(0, workers=8, local_batch=32), samples=50_000)
    >>> for _ in range(3):
    ...     growth.scale.update(0.01 + 6.0 / 32, 32, 0.01 + 6.0 / 256, 256)  # a noise scale of 600
    >>> growth.decide(epoch=1.0).text
    'The batch grows from 256 to 512 at epoch 1: the gradient noise scale is about 600.'
    >>> growth.decide(epoch=2.0) is None, growth.at(1.5).batch
    (True, 512)

    Reference: McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (section 2.3: a batch near the noise
    scale); Mikami et al., Massively Distributed SGD, 2018 (batch-size control).

    Differs from the papers: McCandlish et al. adapt the batch by a formula over the whole run; here it is doubled,
    never shrinks and keeps the local batch, since that decides the batch-norm statistics. Mikami et al. fix the epochs
    beforehand.
    """

    def __init__(self, config: GrowthConfig, first: BatchStage, samples: int):
        self.config, self.scale = config, NoiseScale(DECAY)
        self.largest_batch = min(config.most * first.batch, samples)
        self._plan = BatchPlan((first,))

    @property
    def stages(self) -> tuple[BatchStage, ...]:
        """The stages so far; the first is the configuration's."""
        return self._plan.stages

    def at(self, epoch: float) -> BatchStage:
        """Return the stage in force at `epoch`, as far as stages are decided."""
        return self._plan.at(epoch)

    def hear(self, flush: Flush) -> None:
        """Take in the measurements of some steps."""
        for figures in flush.noise.values():
            self.scale.update(*figures)

    def decide(self, epoch: float) -> Note | None:
        """Double the batch from `epoch` on, if the noise scale allows it; return the remark that says so.

        If noise hides the gradient, the scale counts as unbounded: the batch lies far below it.
        """
        now, value = self.stages[-1], self.scale.value
        doubled = BatchStage(epoch, 2 * now.workers, now.local_batch)
        if self.scale.count < SETTLED or doubled.batch > self.largest_batch:
            return None
        if value is not None and doubled.batch > self.config.scales * value:
            return None
        self._plan = BatchPlan((*self.stages, doubled))
        found = "too large to measure" if value is None else f"about {value:,.0f}"
        return Note(
            f"The batch grows from {now.batch:,} to {doubled.batch:,} at epoch {epoch:.3g}: the gradient noise scale "
            f"is {found}.",
            {"epoch": epoch, "batch": doubled.batch, "noise_scale": value},
        )

    def told(self) -> list[dict[str, float]]:
        """Return the stages that were added, as a configuration lists them."""
        return [{"epoch": s.epoch, "count": s.workers, "local_batch": s.local_batch} for s in self.stages[1:]]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"stages": self.told(), "noise": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the stages that were decided."""
        added = (BatchStage(float(s["epoch"]), int(s["count"]), int(s["local_batch"])) for s in state["stages"])
        self._plan = BatchPlan((self.stages[0], *added))
        self.scale.load_state_dict(state["noise"])
