"""Threads that run the same kernel at once, and the order in which examples are taken."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bigstep.described import usable_cores
from bigstep.errors import ConfigError
from bigstep.sparse.kernels.order import draw_order

__all__ = ["Threads", "epoch_order", "threads_of"]

T = TypeVar("T")

WORTH_A_THREAD = 4096
"""Examples per epoch below which one more thread costs more time than it saves, as measured."""


def threads_of(n_threads: Any, mode: str, examples: int) -> int:
    """Resolve `n_threads` (-1: every core that has enough to do; serial: one) and refuse more threads than cores.

    >>> threads_of(-1, "hogwild", examples=100)
    1
    """
    cores = usable_cores()
    if not isinstance(n_threads, numbers.Integral) or (n_threads != -1 and n_threads < 1):
        raise ConfigError(
            f"n_threads={n_threads!r:.60} is not allowed; give a number from 1 to {cores}, or -1 for every core."
        )
    if int(n_threads) > cores:
        raise ConfigError(
            f"n_threads={n_threads} is more than the {cores} cores this process may use, and waiting threads would "
            f"only slow the others down; give at most {cores}, or -1 for every core."
        )
    if mode == "serial":
        return 1
    return max(1, min(cores, examples // WORTH_A_THREAD)) if n_threads == -1 else int(n_threads)


class Threads:
    """A fixed number of threads; a single one is the caller's. Kernels must release the GIL.

    None of several is the caller's: Ctrl-C is raised in that one, even between the starts of two kernels, and those
    already started would wait for the one that was not.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, "bigstep-sparse") if count > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Run `work(thread)` on every thread at once; return the results in the threads' order."""
        if self._pool is None:
            return [work(0)]
        return self._pool.submit(self._start_all, self._pool, work).result()

    def _start_all(self, pool: ThreadPoolExecutor, work: Callable[[int], T]) -> list[T]:
        others = [pool.submit(work, thread) for thread in range(1, self.count)]
        return [work(0), *(other.result() for other in others)]

    def share(self, thread: int, count: int) -> tuple[int, int]:
        """Return a thread's contiguous part of `range(count)`."""
        return count * thread // self.count, count * (thread + 1) // self.count


def epoch_order(n: int, seed: int, epoch: int, out: NDArray[np.uint32] | None = None) -> NDArray[np.uint32]:
    """Return the order of n examples in an epoch: a permutation that depends on seed and epoch alone.

    `out` is an array to write it into.

    >>> epoch_order(6, seed=0, epoch=0).tolist() == epoch_order(6, seed=0, epoch=0).tolist()
    True
    >>> sorted(epoch_order(6, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    order = np.empty(n, np.uint32) if out is None else out
    draw_order(order, np.uint64(seed % 2**64), np.uint64(epoch))
    return order


def seed_of(random_state: Any) -> int:
    """Turn scikit-learn's `random_state` (number, None or generator) into a seed."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31 - 1))
    if isinstance(random_state, int | np.integer) and random_state >= 0:
        return int(random_state)
    raise ConfigError(f"random_state={random_state!r} is not allowed; give a whole number from 0 up, or None.")
