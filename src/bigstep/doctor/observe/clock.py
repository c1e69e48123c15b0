"""A clock that stops while other work holds the core.

On a shared machine a step may last twice as long for reasons that are not the program's. Linux counts the time in
which a thread was ready to run but had to wait; without that time a figure is what the program would show on a machine
of its own.
"""

from __future__ import annotations

import os
import threading
import time

__all__ = ["now"]


class _Counter:
    """What the system counts for one thread of this process; closed with the thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        try:
            self.file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self.file = -1  # not Linux

    def waited_ns(self) -> int:
        """Return the nanoseconds in which the thread was ready to run but had to wait."""
        # a kernel without these counts returns nothing, or an error
        counts = os.pread(self.file, 64, 0).split()  # time on a processor, time ready but waiting, turns
        return int(counts[1])

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)


_own = threading.local()


def now() -> float:
    """Return seconds, of which only differences mean anything."""
    counter = getattr(_own, "counter", None)
    if counter is None or counter.pid != os.getpid():  # a forked process inherits its parent's counter
        counter = _own.counter = _Counter()
    try:
        waited = counter.waited_ns()
        for _ in range(3):  # a wait between the two readings would belong to one of them only: read again
            before, seconds = waited, time.perf_counter()
            waited = counter.waited_ns()
            if waited == before:
                break
        return seconds - before / 1e9
    except (OSError, IndexError, ValueError):  # an error here must not reach the program
        return time.perf_counter()
