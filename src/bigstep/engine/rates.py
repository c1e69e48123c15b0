"""What changes from step to step by schedule: the batch, the learning rate, and other settings of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from bigstep.config import LrConfig, OptimizerConfig, Piece, RunConfig, Stage
from bigstep.data.sampler import Sampler, Step
from bigstep.engine.ranks import AgreedError
from bigstep.errors import RunError
from bigstep.schedules import BatchPlan, BatchStage, Schedule, constant, join, scale_lr
from bigstep.tables import load
from bigstep.tables.schedules import make_schedule

__all__ = ["Rates", "batch_plan", "learning_rate"]


@dataclass(frozen=True)
class Rates:
    """Sets what an optimizer reads anew in every step, as a function of the samples seen.

    An incomplete batch counts in proportion to its samples. If an update is proportional to the gradient, the gradient
    is scaled (`Pass.counts`); LARS, AdaGrad, Adam and Muon normalize the gradient, so their learning rate is scaled.
    """

    config: RunConfig
    sampler: Sampler
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[float, int], float]
    """(epoch, batch of the stage) -> rate."""

    def set(self, step: Step) -> float:
        """Prepare the optimizer for a step and return the rate of a full batch there."""
        epoch = self.sampler.epochs_at(step.position)
        lr = self.learning_rate(epoch, step.workers * step.local_batch)
        settings = _changing(self.config.optimizer, epoch, lr)
        counts = 1.0 if self.config.optimizer.batch_rule == "linear" else step.filled
        for group in self.optimizer.param_groups:
            group.update(settings, lr=lr * counts * group.get("rate", 1.0))
        return lr


def _changing(rule: OptimizerConfig, epoch: float, lr: float) -> dict[str, float]:
    """Return the other settings that the rule reads anew in every step; all ranks compute the same."""
    if not rule.entry.changing:
        return {}
    try:
        settings: dict[str, float] = load(rule.entry.changing)(rule, epoch, lr)
    except RunError as error:
        raise AgreedError(str(error)) from None
    return settings


def batch_plan(config: RunConfig) -> BatchPlan:
    """Return the stages of a run as a `BatchPlan`."""
    first = BatchStage(0.0, config.workers.count, config.workers.local_batch)
    later = (BatchStage(stage.epoch, stage.count, stage.local_batch) for stage in config.stages)
    return BatchPlan((first, *later))


def learning_rate(
    config: LrConfig, first_batch: int, plan: Literal["auto"] | Sequence[Stage] = ()
) -> Callable[[float, int], float]:
    """Return the learning rate as a function of the epoch and the batch of the current stage."""
    stages = () if plan == "auto" else plan

    def scaled(batch: int) -> float:
        grown = min(batch, config.saturation or batch)
        changed: float = (batch / grown) ** config.beyond
        return changed * scale_lr(config.base, grown, base_batch=config.base_batch, rule=config.scaling)

    def of_stage(epoch: float) -> float:
        return next((stage.rate for stage in reversed(stages) if stage.epoch <= epoch), 1.0)

    listed = _warmed_longer(config.schedule, first_batch / config.warmup_batch if config.warmup_batch else 1.0)
    begins = [0.0, *(piece.until for piece in listed)]
    unscaled = config.base / scaled(first_batch)
    pieces = [(piece.until, _schedule(piece, begin, unscaled)) for piece, begin in zip(listed, begins, strict=False)]
    multiple = join(*pieces) if pieces else constant(1.0)
    return lambda epoch, batch: scaled(batch if config.follow_plan else first_batch) * multiple(epoch) * of_stage(epoch)


def _warmed_longer(schedule: Sequence[Piece], factor: float) -> Sequence[Piece]:
    """Return the schedule with its first warm-up `factor` times as long, but at most half of all epochs.

    Pieces that it then covers are left out. A warm-up must last for some steps, of which larger batches have fewer in
    an epoch.
    """
    if factor <= 1 or not schedule or schedule[0].shape != "warmup":
        return schedule
    until = max(schedule[0].until, min(factor * schedule[0].until, schedule[-1].until / 2))
    return [replace(schedule[0], until=until), *(piece for piece in schedule if piece.until > until)]


def _schedule(piece: Piece, begin: float, unscaled: float) -> Schedule:
    start = unscaled if piece.start == "base" else piece.start
    return make_schedule(piece.shape, {**vars(piece), "start": start, "begin": begin})
