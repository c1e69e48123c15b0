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
    """Run the command as all that this process does, and end the process."""
    ask_for_queues()
    try:
        main()
    except SystemExit as ending:
        if "torch" in sys.modules and isinstance(ending.code, int | None):
            _leave(ending.code or 0)
        raise


def _leave(status: int) -> None:
    """End now, unless what was printed cannot be written: Python tells of that when it ends in its own way.

    That way takes everything apart piece by piece, with torch for most of a second; the system does it at once.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as Python does
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit(status)


if __name__ == "__main__":
    program()
