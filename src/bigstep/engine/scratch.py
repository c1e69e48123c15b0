"""Temporary folders that do not pile up: a process that is killed cannot remove its own, so the next one does.

Imports no torch: the launcher of ranks uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Scratch", "scratch_folder", "sweep"]

_NAME = "bigstep-scratch-"
_OURS = re.compile(_NAME + r"[a-z0-9_]{8}")


class Scratch:
    """A temporary folder, held by a lock that the system releases when its process ends, however it ends."""

    def __init__(self) -> None:
        """Make it, and remove those whose processes were killed."""
        sweep()
        made = Path(tempfile.mkdtemp(prefix=".bigstep-"))
        self._held = os.open(made, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks: then no process sweeps there either
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # others look for this name, and by now the folder is locked
        self.path = made.rename(made.with_name(_NAME + made.name.removeprefix(".bigstep-")))

    def close(self) -> None:
        """Remove it; harmless when called twice."""
        if self._held >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = -1


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Lend out the folder of a `Scratch`."""
    with contextlib.closing(Scratch()) as scratch:
        yield scratch.path


def sweep() -> None:
    """Remove scratch folders of this user that no process holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{_NAME}*"):
        if not _OURS.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # held, of another user, or gone just now
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(folder).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(folder)
