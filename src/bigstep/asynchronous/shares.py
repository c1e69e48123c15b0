"""The run as a numbered list of shares; a share holds the samples of one gradient of one replica.

The order is that of the synchronous sampler: step after step, and within a step worker after worker. Replicas draw
numbers from one counter, so together they see every sample once per epoch, however fast each of them is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from bigstep.data.feed import Request
from bigstep.data.sampler import Position, Sampler, Step
from bigstep.engine.build import Run
from bigstep.engine.methods.synchronous import Synchronous

__all__ = ["Shares", "batches_of", "gradient_of"]


class Shares:
    """Looks up shares by number; numbers must rise, as a counter gives them.

    A share is a `Step` of one worker: its position counts shares in all, which also ties dropout to the share.

    >>> from bigstep.schedules import BatchPlan, BatchStage
    >>> sampler = Sampler(10, seed=0, plan=BatchPlan([BatchStage(0, workers=2, local_batch=2)]))
    >>> shares = Shares(sampler, epochs=1)
    >>> [(share.start, share.stop) for share in map(shares.at, (0, 1, 4))], shares.at(5)
    ([(0, 2), (2, 4), (8, 10)], None)
    """

    def __init__(self, sampler: Sampler, epochs: float, limit: int | None = None):
        """Args:
        sampler: The order of the run.
        epochs: Passes over the training set.
        limit: End after this many shares, if that comes first.
        """
        self._shares = _shares_of(sampler, epochs)
        self._limit = limit

    def at(self, number: int) -> Step | None:
        """Return the share with this number, or None past the end of the run."""
        if self._limit is not None and number >= self._limit:
            return None
        for share in self._shares:
            if share.position.step == number:
                return share
            assert share.position.step < number, f"share {number} was asked for after {share.position.step}"
        return None


def _shares_of(sampler: Sampler, epochs: float) -> Iterator[Step]:
    number = 0
    for step in sampler.steps(epochs):
        for worker in range(step.active):
            start, stop = step.share(worker)
            yield Step(Position(step.position.epoch, start, number), stop, workers=1, local_batch=stop - start)
            number += 1


def batches_of(run: Run, shares: Shares, draw: Callable[[], int]) -> Iterator[tuple[Step, tuple[Any, Any]]]:
    """Yield shares with their samples until none is left.

    A data set in memory is asked for one share at a time, so that a replica that dies holds only one. Loader processes
    work ahead, and hold the shares they load.
    """
    if run.train_feed.loaders is None:
        while (share := shares.at(draw())) is not None:
            for batch in run.train_feed(run.method.requests([share])):
                yield share, batch
        return
    drawn: deque[Step] = deque()

    def requests() -> Iterator[Request]:
        while (share := shares.at(draw())) is not None:
            drawn.append(share)
            yield from run.method.requests([share])

    for batch in run.train_feed(requests()):
        yield drawn.popleft(), batch
        if run.train_feed.waits is not None:
            run.train_feed.waits.forget()  # never read, and a GPU's events would accumulate


def gradient_of(run: Run, share: Step, batch: tuple[Any, Any]) -> float:
    """Leave the gradient of a share in the weights' `.grad`, and return its loss."""
    assert isinstance(run.method, Synchronous), "replicas compute gradients as a synchronous run of one rank does"
    return float(run.method.accumulate(share, iter([batch])).loss)
