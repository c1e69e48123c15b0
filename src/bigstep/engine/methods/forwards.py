"""How a rank runs its workers: which samples go through the network together.

On a CPU each worker is one forward. On a GPU several workers of equal share go through one forward, and ghost batch
norm keeps their statistics apart. Either way a forward's memory is bounded, whatever the number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigstep.data.sampler import Step, hosted_workers

__all__ = ["Forward", "forwards_of"]


@dataclass(frozen=True)
class Forward:
    """Positions [start, stop) of the epoch's order: the shares of `workers` neighbours, all of one size."""

    first_worker: int
    workers: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Samples in this forward."""
        return self.stop - self.start


def forwards_of(step: Step, rank: int, ranks: int, max_samples: int) -> list[Forward]:
    """Return the forwards of one rank in one step; empty if none of its workers has samples.

    Args:
        step: The step.
        rank: This rank.
        ranks: Number of ranks.
        max_samples: Join workers until a forward holds this many samples; a worker is never split.

    >>> from bigstep.data.sampler import Position
    >>> step = Step(Position(), stop=70, workers=4, local_batch=32)
    >>> [(forward.workers, forward.size) for forward in forwards_of(step, 0, 1, max_samples=64)]
    [(2, 46), (1, 24)]
    """
    forwards: list[Forward] = []
    for worker in hosted_workers(step.workers, rank, ranks):
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
