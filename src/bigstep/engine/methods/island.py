"""One island of a rank, and its part of a step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bigstep.data.sampler import Position, Step, hosted_workers
from bigstep.engine.methods.synchronous import Synchronous

__all__ = ["Island", "Part", "part_of"]

_REMEMBERED = 64
"""Steps whose losses an island remembers: more than there are between three flushes of the meter."""


@dataclass
class Island:
    """An island that this rank hosts: a synchronous method, and what is put under the model when it computes."""

    number: int
    method: Synchronous
    weights: list[Tensor]
    optimizer_state: defaultdict[Tensor, Any] = field(default_factory=lambda: defaultdict(dict))
    samples: list[int] = field(default_factory=list)
    """By fragment, the samples it has seen since its last meeting in that fragment."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Its part of the loss of the last steps, by step: if a rank is lost, these may not be recorded yet."""

    def remember(self, taken: int, loss: Tensor) -> None:
        """Keep the loss of a step, and drop an old one."""
        self.losses[taken] = loss
        self.losses.pop(taken - _REMEMBERED, None)


@dataclass(frozen=True)
class Part(Step):
    """An island's part of a step: a step of its own workers, with the shares that they have in the whole step."""

    whole: Step
    first_worker: int
    """The number of its first worker among all workers."""

    @property
    def filled(self) -> float:
        """That of the whole step, so that islands that average after every step take the synchronous step."""
        return self.whole.filled

    @property
    def active(self) -> int:
        """Workers of the island with samples in this step."""
        return min(self.workers, max(0, self.whole.active - self.first_worker))

    def share(self, worker: int) -> tuple[int, int]:
        """Return the positions of one of its workers."""
        return self.whole.share(self.first_worker + worker)


def part_of(step: Step, island: int, islands: int) -> Part:
    """Return an island's part of a step.

    >>> whole = Step(Position(offset=8), stop=24, workers=4, local_batch=4)
    >>> [(part.start, part.stop, part.workers, part.first_worker) for part in (part_of(whole, i, 2) for i in range(2))]
    [(8, 16, 2, 0), (16, 24, 2, 2)]
    """
    workers = hosted_workers(step.workers, island, islands)
    start, stop = step.share(workers.start)[0], step.share(workers.stop - 1)[1]
    place = Position(step.position.epoch, start, step.position.step)
    return Part(place, stop, len(workers), step.local_batch, step, workers.start)
