"""A clock that stands still while other work holds the core.

On a machine that is shared, a step may last twice as long for reasons that are not the program's. Linux counts the
time that a thread was ready to run and had to wait; without it a figure is what the program would show on a machine of
its own.
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
        """Nanoseconds in which the thread was ready to run and had to wait."""
        # a kernel that does not count says nothing, or refuses
        counts = os.pread(self.file, 64, 0).split()  # time on a processor, time ready but waiting, turns
        return int(counts[1])

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)


_own = threading.local()


def now() -> float:
    """Return seconds, for differences."""
    counter = getattr(_own, "counter", None)
    if counter is None or counter.pid != os.getpid():  # a forked process has inherited that of its parent
        counter = _own.counter = _Counter()
    try:
        waited = counter.waited_ns()
        for _ in range(3):  # whoever waited between the two readings would subtract a wait that lies behind the time
            before, seconds = waited, time.perf_counter()
            waited = counter.waited_ns()
            if waited == before:
                break
        return seconds - before / 1e9
    except (OSError, IndexError, ValueError):  # whatever the clock meets, the program must not feel it
        return time.perf_counter()
