"""The recorder of one process: it writes facts, knows the user's lines, adds up a step, and ends the program."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from bigstep.doctor.facts import End, Event, Start
from bigstep.doctor.observe.clock import now
from bigstep.doctor.settings import Settings

__all__ = ["Examined", "Recorder", "Tally", "replace"]

_PATIENCE_S = 5.0
"""How long a rank that has seen enough waits for the others, so that none loses its connection."""
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", str(Path(__file__).parents[1]))


class Examined(SystemExit):
    """Raised when enough was seen; as a SystemExit with status 0 it lets `finally` and `with` blocks run."""


@dataclass
class Tally:
    """What adds up from one update to the next."""

    samples: int = 0
    micro_steps: int = 0
    input_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    exchange_s: float = 0.0
    syncs: int = 0
    sync_s: float = 0.0
    sync_line: str = ""
    clipped: bool = False
    autocast: str = ""
    began: float = field(default_factory=now)


class Recorder:
    """Writes the events of this process, and of processes forked from it, a file for each process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.updates = 0
        self.tally = Tally()
        self.look_until = 0
        """Number of updates until which those after a checkpoint are detailed too: a resumed run should repeat them."""
        self.enough = False
        self._looking = threading.local()
        self.before_end: list[Callable[[], None]] = []
        self.judge_file: Callable[[Any], None] = lambda path: None
        """Refuses or notes a file that is about to be written."""
        self._pid = 0
        self._born = os.getpid()
        self._file = -1
        self._waiting: list[str] = []
        self._flushed = 0.0
        self._own_code: dict[CodeType, bool] = {}

    @property
    def detailed(self) -> bool:
        """Whether this update is looked at in detail; the others are only timed, so that looking does not slow them."""
        return not self.settings.only_time and (self.updates < self.settings.detail or self.updates < self.look_until)

    @property
    def looking(self) -> bool:
        """Whether an observer is using torch in this thread: its calls are not the program's."""
        return bool(getattr(self._looking, "now", False))

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Use torch inside this without being observed."""
        before, self._looking.now = self.looking, True
        try:
            yield
        finally:
            self._looking.now = before

    def write(self, event: Event) -> None:
        """Write an event: at once while looking in detail, every half second while only timing."""
        if self._pid != os.getpid():
            self._open()
        self._waiting.append(event.to_json())
        if self.detailed or time.monotonic() - self._flushed > 0.5:
            self.flush()

    def flush(self) -> None:
        """Write the waiting events to the file."""
        if self._waiting and self._pid == os.getpid():
            os.write(self._file, ("\n".join(self._waiting) + "\n").encode())
            self._waiting.clear()
        self._flushed = time.monotonic()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._waiting = []  # a forked process inherits lines that its parent will write
        path = Path(self.settings.facts) / f"{self._pid}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        torch = sys.modules.get("torch")
        version = str(getattr(torch, "__version__", ""))
        self._waiting.append(Start(pid=self._pid, rank=self.rank, world=self.world, torch=version).to_json())

    def line(self) -> str:
        """Return the innermost line of the user's own code on the stack, as file:number of the original file."""
        frame = sys._getframe(1)
        while frame is not None:
            if self.owns(frame.f_code):
                return f"{self._original(frame.f_code.co_filename)}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def owns(self, code: CodeType) -> bool:
        """Whether code is the user's own, and no library's."""
        own = self._own_code.get(code)
        if own is None:
            own = self._own_code[code] = self._is_own(code.co_filename)
        return own

    def called_by_own(self, depth: int = 2) -> bool:
        """Whether the user's own code made the present call itself, and not a framework."""
        frame = sys._getframe(depth)
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES[-1]):
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None and self.owns(frame.f_code)

    def _is_own(self, filename: str) -> bool:
        filename = os.path.realpath(filename)
        roots = (self.settings.root + os.sep, self.settings.own + os.sep)
        return filename.startswith(roots) and not any(part in filename for part in _LIBRARIES)

    def _original(self, filename: str) -> str:
        filename = os.path.realpath(filename)
        for root in (self.settings.root, self.settings.original):
            if filename.startswith(root + os.sep):
                return os.path.relpath(filename, root)
        return filename

    def count_update(self, ended: float) -> None:
        """Count an update that ended at this time, and end the program when enough was seen."""
        looked = self.detailed
        self.updates += 1
        self.tally = Tally() if looked else Tally(began=ended)  # the time for looking belongs to no step
        if self.updates >= self.settings.steps:
            self.stop()

    def stop(self) -> None:
        """End the program; one that catches the exception is ended at the next opportunity."""
        if not self.enough:
            self.enough = True
            self.close("stopped")
            self._meet_the_others()
        raise Examined(0)

    def close(self, reason: str, message: str = "") -> None:
        """Take the last looks, and write how this process ended."""
        if os.getpid() not in (self._pid, self._born):
            return  # a forked process in which nothing was seen
        looks, self.before_end = self.before_end, []
        for look in looks:
            try:
                with self.quietly():
                    look()
            except Exception as error:  # a look that fails must not become the program's failure
                message = message or f"{type(error).__name__} while looking: {error}"
        self.write(End(reason=reason, message=message))
        self.flush()

    def _meet_the_others(self) -> None:
        folder = Path(self.settings.facts)
        (folder / f"{self._pid}.done").touch()
        deadline = time.monotonic() + _PATIENCE_S
        while len(list(folder.glob("*.done"))) < self.world and time.monotonic() < deadline:
            time.sleep(0.02)


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace an attribute by `make(original)`, which takes the original's name."""
    original = getattr(owner, name)
    new = make(original)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__", "__wrapped__"):
        try:
            setattr(new, attribute, original if attribute == "__wrapped__" else getattr(original, attribute))
        except AttributeError:
            continue
    setattr(owner, name, new)
