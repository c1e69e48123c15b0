"""Reading many files in one go, without Python's lock.

Python releases its lock for each system call, and takes it again: five times for a file that is read in 20
microseconds. A thread that reads alone does not notice. Several that read at once wait for each other, most of all on a
machine with many cores, where releasing the lock means waking another core.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numba import njit, types

__all__ = ["read_files"]

_open = types.ExternalFunction("open", types.intc(types.uintp, types.intc))
_read = types.ExternalFunction("read", types.intp(types.intc, types.uintp, types.uintp))
_close = types.ExternalFunction("close", types.intc(types.intc))
_FLAGS = os.O_RDONLY | os.O_CLOEXEC


def read_files(paths: Sequence[bytes], room: memoryview) -> list[memoryview]:
    """Read files into `room`, one after another, until one fails or does not fit; return those that were read.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"some"), file.flush()
    ...     [bytes(part) for part in read_files([os.fsencode(file.name), b"missing"], memoryview(bytearray(9)))]
    [b'some']
    """
    names = np.frombuffer(b"\0".join([*paths, b""]), dtype=np.uint8)
    begins = np.cumsum([0, *(len(path) + 1 for path in paths)])
    ends = np.zeros(len(paths), dtype=np.int64)
    count = _read_all(names, begins[:-1], np.frombuffer(room, dtype=np.uint8), ends)
    places = [0, *ends[:count].tolist()]
    return [room[begin:end] for begin, end in zip(places, places[1:], strict=False)]


def _compiled(function):
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # the folder for cached machine code is not writable
        return njit(nogil=True)(function)


@_compiled
def _read_all(names, begins, room, ends):
    """Return how many files were read; `ends` is where each of them ends in `room`."""
    at = 0
    for number in range(len(begins)):
        file = _open(names.ctypes.data + begins[number], _FLAGS)
        if file < 0:
            return number
        got = -1
        while at < len(room):  # if a file fills it to the end, there is no telling whether more follows
            got = _read(file, room.ctypes.data + at, len(room) - at)
            if got <= 0:
                break
            at += got
        _close(file)
        if got != 0:
            return number
        ends[number] = at
    return len(begins)
