"""An assembly line for collectives of several phases: many buckets in flight, the same order on every rank.

The hazard it removes: with Gloo, operations of a group are matched by the order in which each rank issues them. A torus
that starts its second phase in a callback, whenever the first happens to end, issues operations in an order that
differs from rank to rank; the ranks then wait for one another for ever or, worse, sum different buckets. Here phase k
of every bucket is started by the k-th thread, which takes buckets in the order in which DDP handed them over (the same
on all ranks), on a process group that no other phase uses. So within each group the order is the order of buckets,
while different phases of different buckets run at the same time and backward is never blocked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Protocol

import torch

__all__ = ["Line", "Steps", "Waitable"]


class Waitable(Protocol):
    """An operation under way, such as the Work of an asynchronous collective."""

    def wait(self) -> object:
        """Return when it has ended; raise if it failed."""


# A collective in steps: each `next` waits for nothing, does local work, starts operations and yields them.
Steps = Iterator[Iterable[Waitable]]

_Item = tuple[Steps, Iterable[Waitable], Callable[[BaseException | None], None]]


class Line:
    """Threads that pass collectives on from phase to phase; the k-th waits for phase k - 1 and starts phase k.

    Args:
        stream: On which the threads queue their work on a GPU; None on a CPU.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self._queues: list[SimpleQueue[_Item | None]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._broken: BaseException | None = None

    def submit(self, steps: Steps, done: Callable[[BaseException | None], None]) -> None:
        """Run `steps` after all those submitted before; call `done` in the thread that ends them.

        Hazard: every rank must submit the same collectives in the same order.
        """
        self._put(0, (steps, (), done))

    def close(self) -> None:
        """Wait until what was submitted has gone through, and end the threads."""
        self._end(0)
        for thread in self._threads:
            thread.join()

    def _end(self, phase: int) -> None:
        with self._lock:
            if phase < len(self._queues):
                self._queues[phase].put(None)

    def _put(self, phase: int, item: _Item) -> None:
        with self._lock:
            if phase == len(self._queues):
                self._queues.append(SimpleQueue())
                # a daemon: a rank that fails for another reason must not wait for its network
                arguments = (phase, self._queues[phase])
                thread = threading.Thread(target=self._serve, args=arguments, name=f"exchange-{phase}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queues[phase].put(item)

    def _serve(self, phase: int, queue: SimpleQueue[_Item | None]) -> None:
        # a new thread starts on GPU 0, which may be another rank's, and on the stream that computes
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            self._take_from(phase, queue)

    def _take_from(self, phase: int, queue: SimpleQueue[_Item | None]) -> None:
        while (item := queue.get()) is not None:
            steps, under_way, done = item
            try:
                if self._broken is not None:
                    raise self._broken  # the ranks no longer agree on the order: nothing after a failure may run
                for work in under_way:
                    work.wait()
                started = next(steps)
            except StopIteration:
                done(None)
            except BaseException as error:
                self._broken = self._broken or error
                done(error)
            else:
                self._put(phase + 1, (steps, started, done))
        self._end(phase + 1)
