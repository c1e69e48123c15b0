"""The door: `python -m bigstep` is `bigstep`."""

from __future__ import annotations

import atexit
import os
import sys
import threading

from bigstep.cli import main
from bigstep.gpu.queues import ask_for_queues

__all__ = ["program"]


def program() -> None:
    """Run the command, which is all that this process does, and end the process."""
    ask_for_queues()
    try:
        main()
    except SystemExit as ending:
        if "torch" in sys.modules and isinstance(ending.code, int | None):
            _leave(ending.code or 0)
        raise


def _leave(status: int) -> None:
    """Exit at once; if the output cannot be flushed, return, so that Python's normal exit reports it.

    The normal exit frees objects one by one, which with torch takes most of a second; the system frees them at once.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons, as Python does
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit(status)


if __name__ == "__main__":
    program()
