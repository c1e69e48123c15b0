"""Which worker sees which sample: a pure function of (seed, epoch, step, worker), never of the ranks.

Each epoch is one shuffle of the training set, cut into global batches, each cut into the workers' shares. The last
batch of an epoch holds what is left: every sample is seen once an epoch, none is padded or dropped, unless
`drop_last` leaves that batch out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bigstep.schedules import Plan

__all__ = ["Position", "Sampler", "Step", "hosted_workers"]


@dataclass(frozen=True)
class Position:
    """A position in the run: complete epochs, samples seen in this epoch, steps taken in all."""

    epoch: int = 0
    offset: int = 0
    step: int = 0


@dataclass(frozen=True)
class Step:
    """One update: positions [start, stop) of an epoch's order, divided among workers."""

    position: Position
    stop: int
    workers: int
    local_batch: int

    @property
    def start(self) -> int:
        """The first position in the epoch's order."""
        return self.position.offset

    @property
    def size(self) -> int:
        """Samples in this step: the global batch, or what is left of the epoch."""
        return self.stop - self.start

    @property
    def filled(self) -> float:
        """How much of the global batch this step holds: 1, and less only in the last step of an epoch.

        The step counts this much, so that every sample moves the weights as much as in a full batch.

        >>> Step(Position(offset=96), stop=120, workers=4, local_batch=8).filled
        0.75
        """
        return self.size / (self.workers * self.local_batch)

    @property
    def active(self) -> int:
        """Workers with samples in this step: all of them except in the last batch of an epoch.

        The remainder goes to as few workers as their local batch allows, so that no worker computes batch-norm
        statistics over a handful of samples.
        """
        return min(self.workers, -(-self.size // self.local_batch))

    def share(self, worker: int) -> tuple[int, int]:
        """Return the positions [start, stop) of one worker; shares differ by one sample at most.

        >>> step = Step(Position(), stop=70, workers=4, local_batch=32)
        >>> [step.share(worker) for worker in range(4)]
        [(0, 23), (23, 46), (46, 70), (70, 70)]
        """
        first, last = min(worker, self.active), min(worker + 1, self.active)
        return (
            self.start + self.size * first // self.active,
            self.start + self.size * last // self.active,
        )


class Sampler:
    """The order of all samples of a run.

    >>> from bigstep.schedules import BatchPlan, BatchStage
    >>> sampler = Sampler(10, seed=0, plan=BatchPlan([BatchStage(0, workers=2, local_batch=2)]))
    >>> [(step.start, step.stop) for step in sampler.steps(epochs=1)]
    [(0, 4), (4, 8), (8, 10)]
    >>> sorted(sampler.order(0).tolist()) == list(range(10))
    True
    >>> [(step.start, step.stop) for step in Sampler(10, 0, sampler.plan, drop_last=True).steps(epochs=2)]
    [(0, 4), (4, 8), (0, 4), (4, 8)]
    """

    def __init__(self, size: int, seed: int, plan: Plan, drop_last: bool = False):
        """Args:
        size: Samples in the training set.
        seed: Decides every epoch's shuffle.
        plan: Workers and local batch by epoch.
        drop_last: Leave out the incomplete last batch of an epoch.
        """
        self.size, self.seed, self.plan, self.drop_last = size, seed, plan, drop_last
        self._cached: tuple[int, Tensor] | None = None

    def order(self, epoch: int) -> Tensor:
        """Return the shuffle of an epoch: `order[position]` is the index of a sample."""
        if self._cached is None or self._cached[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._cached = epoch, torch.randperm(self.size, generator=generator)
        return self._cached[1]

    def step_at(self, position: Position) -> Step:
        """Return the step that starts at a position."""
        stage = self.plan.at(position.epoch + position.offset / self.size)
        stop = min(position.offset + stage.batch, self.size)
        return Step(position, stop, stage.workers, stage.local_batch)

    def steps(self, epochs: float, begin: Position = Position()) -> Iterator[Step]:  # noqa: B008 - frozen
        """Yield the steps of a run from `begin` on, until `epochs` passes are complete."""
        position, samples_wanted = begin, epochs * self.size
        while position.epoch * self.size + position.offset < samples_wanted:
            step = self.step_at(position)
            yield step
            position = self.after(step)

    def after(self, step: Step) -> Position:
        """Return the position after a step."""
        taken = step.position.step + 1
        behind = Position(step.position.epoch, step.stop, taken)
        ended = step.stop == self.size or (self.drop_last and self.step_at(behind).filled < 1)
        return Position(step.position.epoch + 1, 0, taken) if ended else behind

    def samples_at(self, position: Position) -> int:
        """Count the samples seen up to a position, including those that were left out."""
        return position.epoch * self.size + position.offset

    def epochs_at(self, position: Position) -> float:
        """Return a position in epochs: what schedules are functions of."""
        return position.epoch + position.offset / self.size

    def where(self, position: Position) -> dict[str, float]:
        """Return a position as the rows of the records hold it."""
        return {"epoch": self.epochs_at(position), "samples": self.samples_at(position)}

    def total_steps(self, epochs: float) -> int:
        """Count the steps of a whole run."""
        return sum(1 for _ in self.steps(epochs))


def hosted_workers(workers: int, rank: int, ranks: int) -> range:
    """Return the workers that a rank hosts: contiguous blocks whose sizes differ by one at most.

    If there are fewer workers than ranks, the first ranks host one each.

    >>> [hosted_workers(7, rank, 3) for rank in range(3)], [hosted_workers(2, rank, 3) for rank in range(3)]
    ([range(0, 2), range(2, 4), range(4, 7)], [range(0, 1), range(1, 2), range(2, 2)])
    """
    ranks = min(ranks, workers)
    rank = min(rank, ranks)
    return range(workers * rank // ranks, min(workers, workers * (rank + 1) // ranks))
