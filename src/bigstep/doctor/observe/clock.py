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

_files: dict[int, int] = {}
"""What the system counts for each thread."""
os.register_at_fork(after_in_child=_files.clear)


def now() -> float:
    """Return seconds, for differences."""
    thread = threading.get_ident()
    file = _files.get(thread)
    if file is None:
        file = _files[thread] = _open()
    if file < 0:
        return time.perf_counter()
    waited_ns = int(os.pread(file, 64, 0).split()[1])  # time on a processor, time ready but waiting, turns
    return time.perf_counter() - waited_ns / 1e9


def _open() -> int:
    try:
        file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    except OSError:
        return -1  # not Linux, or a kernel that does not count
    return file if len(os.pread(file, 64, 0).split()) >= 2 else -1
