"""How a rank runs its workers: which samples go through the network together, and the weight of each forward.

On a GPU several workers of equal share go through one forward, and ghost batch norm keeps their statistics apart. On a
CPU each worker is one forward, unless samples cannot affect one another in the network. Either way a forward's memory
is bounded, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from bigstep.data.feed import Request
from bigstep.data.sampler import Sampler, Step

__all__ = ["Forward", "Forwards", "forwards_of"]


@dataclass(frozen=True)
class Forward:
    """Positions [start, stop) of the epoch's order: the shares of `workers` consecutive workers, all of one size."""

    first_worker: int
    workers: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Samples in this forward."""
        return self.stop - self.start


def forwards_of(step: Step, workers: Iterable[int], max_samples: int) -> list[Forward]:
    """Return the forwards of some workers in one step; empty if none of them has samples.

    Args:
        step: The step.
        workers: Numbers of workers in ascending order, as one rank hosts them.
        max_samples: Join workers until a forward holds this many samples; a worker is never split.

    >>> from bigstep.data.sampler import Position
    >>> step = Step(Position(), stop=70, workers=4, local_batch=32)
    >>> [(forward.workers, forward.size) for forward in forwards_of(step, range(4), max_samples=64)]
    [(2, 46), (1, 24)]
    """
    forwards: list[Forward] = []
    for worker in workers:
        start, stop = step.share(worker)
        if start == stop:
            continue
        last = forwards[-1] if forwards else None
        if (
            last is not None
            and last.size == last.workers * (stop - start)
            and last.size + (stop - start) <= max_samples
        ):
            forwards[-1] = Forward(last.first_worker, last.workers + 1, last.start, stop)
        else:
            forwards.append(Forward(worker, 1, start, stop))
    return forwards


@dataclass(frozen=True)
class Forwards:
    """The forwards of a run on one rank.

    Args:
        sampler: The order of the samples.
        hosted: The workers of a step that this rank hosts.
        max_samples: Of one forward.
        targets: How many targets each of some samples has; None where each has one.
        measured: Every so many steps the noise scale is measured and the first worker has a forward by itself,
            whatever the number of ranks; 0 leaves both to `Synchronous`.
        cut_every: At least so many samples lie between two measurements if a step is one forward on the GPU of a single
            rank: to be measured it is cut in two, and runs without a graph.
    """

    sampler: Sampler
    hosted: Callable[[Step], Iterable[int]]
    max_samples: int
    targets: Callable[[Tensor], Tensor | None] = lambda indices: None
    measured: int = 0
    cut_every: int = 51_200

    def of(self, step: Step, *, cut: bool = False) -> list[Forward]:
        """Return the forwards of a step; `cut` makes two of one, so that they can be compared."""
        if cut and self.measured:
            hosted = list(self.hosted(step))
            first = [worker for worker in hosted if worker == 0]
            return [
                *forwards_of(step, first, self.max_samples),
                *forwards_of(step, hosted[len(first) :], self.max_samples),
            ]
        forwards = forwards_of(step, self.hosted(step), self.max_samples)
        if cut and len(forwards) == 1:
            forwards = forwards_of(step, self.hosted(step), -(-step.active // 2) * (step.size // step.active))
        return forwards

    def request(self, step: Step, forward: Forward) -> Request:
        """Return what a forward asks of the feed."""
        epoch = step.position.epoch
        return Request(epoch, self.sampler.order(epoch)[forward.start : forward.stop])

    def requests(self, steps: Iterable[Step], cut: Callable[[Step], bool]) -> Iterator[Request]:
        """Yield the requests of some steps of one epoch."""
        for step in steps:
            for forward in self.of(step, cut=cut(step)):
                yield self.request(step, forward)

    def weights(self, step: Step, forwards: Sequence[Forward]) -> list[float]:
        """Return the weight of each forward in the mean over the step: its share of the samples, or of the targets."""
        if len(forwards) == 1 and forwards[0].size == step.size:
            return [1.0]
        counts = self.targets(self.sampler.order(step.position.epoch)[step.start : step.stop]) if forwards else None
        if counts is None:
            return [forward.size / step.size for forward in forwards]
        total = max(float(counts.sum()), 1.0)
        shares = ((forward.start - step.start, forward.stop - step.start) for forward in forwards)
        return [float(counts[start:stop].sum()) / total for start, stop in shares]
