"""Checkpoints that no step waits for: the state is copied, and a thread writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigstep.engine.checkpoint import save_checkpoint
from bigstep.engine.ranks import on_host

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Writes one checkpoint at a time; a second one waits for the first.

    A checkpoint that cannot be written does not end the run: the one before it stays, and `problem` is called.
    """

    def __init__(self, folder: Path, keep: int, problem: Callable[[str], None], *, sync: bool = True):
        """Args:
        folder: Where checkpoints go.
        keep: How many stay.
        problem: Called, in the thread of the run, with a sentence about a checkpoint that could not be written.
        sync: Wait for the disk, so that they survive a crash of the machine and not only of the process.
        """
        self._folder, self._keep, self._problem, self._sync = folder, keep, problem, sync
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._saved = True

    def submit(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state and start writing it."""
        self.wait()
        self._saved = True
        self._thread = threading.Thread(target=self._write, args=(step, on_host(state, copy=True)), name="checkpoint")
        self._thread.start()

    def wait(self) -> bool:
        """Return when what was submitted is on disk (True), or has failed (False)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            sentence, self._failure = self._failure, None
            self._saved = False
            self._problem(sentence)
        return self._saved

    def _write(self, step: int, state: dict[str, Any]) -> None:
        try:
            save_checkpoint(self._folder, step, state, self._keep, sync=self._sync)
        except Exception as error:  # no error may end the thread silently
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._failure = (
                f"The checkpoint of step {step} could not be written to {self._folder} ({reason}); the run "
                "goes on, and can be resumed from the one before it."
            )
