"""Naming why a step on a CPU takes many times as long as it should: other programs occupy the cores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from bigstep.engine.meter import Flush
from bigstep.engine.methods.base import Note
from bigstep.engine.observers.base import Observer

__all__ = ["BusyWatch"]

_LONG_ENOUGH_S = 5.0
"""Seconds of computing before anything is said."""
_OWN = 0.6
"""If the threads get less than this share of the processor time they could use, others have it."""
_CROWDED = 1.5
"""Load of the machine per core from which on other programs are running; this run alone makes one."""


class BusyWatch(Observer):
    """Says once if other programs often keep the threads of this process from running.

    All threads of an operation end together, and a small network has thousands of operations a step. A thread that has
    no core holds up the others: two threads on two busy cores were seen to take 30 times as long as one.

    Args:
        threads: The number that an operation uses.
        rank: That of this process, whose times are read.

    >>> watch = BusyWatch(threads=2, rank=0)
    >>> watch.see(4.0, 1.8, 5.5, cores=2)
    >>> watch.see(4.0, 1.8, 5.5, cores=2)  # doctest: +NORMALIZE_WHITESPACE
    'Other programs keep this machine busy (load 5.5 on 2 cores), and the 2 threads of an operation wait for each other:
    OMP_NUM_THREADS=1, or as many --procs as cores, may be several times as fast. Last bits may differ.'
    >>> watch.see(9.0, 1.8, 5.5, cores=2)  # once is enough
    """

    def __init__(self, threads: int, rank: int) -> None:
        self._threads, self._rank = threads, rank
        self._computed_s = self._had_s = 0.0
        self._clock = time.process_time()

    def flushed(self, flush: Flush) -> Iterable[Note]:
        """Compare the time that computing took with the processor time of this process."""
        now = time.process_time()
        had_s, self._clock = now - self._clock, now
        cores = os.cpu_count() or 1
        if (sentence := self.see(flush.compute_by_rank[self._rank], had_s, os.getloadavg()[0], cores)) is not None:
            yield Note(sentence)

    def see(self, compute_s: float, had_s: float, load: float, cores: int) -> str | None:
        """Take the seconds of computing and of processor time since the last call, and the machine's load."""
        if self._threads < 2:
            return None
        self._computed_s += compute_s
        self._had_s += had_s
        if self._computed_s < _LONG_ENOUGH_S:
            return None
        alone = self._had_s > _OWN * self._threads * self._computed_s or load < _CROWDED * cores
        self._computed_s = self._had_s = 0.0
        if alone:
            return None
        threads, self._threads = self._threads, 0
        return (
            f"Other programs keep this machine busy (load {load:.1f} on {cores} cores), and the {threads} threads of "
            "an operation wait for each other: OMP_NUM_THREADS=1, or as many --procs as cores, may be several times "
            "as fast. Last bits may differ."
        )
