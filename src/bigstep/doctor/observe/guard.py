"""No file of the user's is harmed: the program runs in a copy, and what it writes elsewhere is refused or told.

Python announces every file that it opens for writing, removes or renames. A file outside the scratch copy that
was there before the examination is not to be touched; new files are allowed and listed in the report.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bigstep.doctor.facts import Wrote
from bigstep.doctor.observe.recorder import Recorder

__all__ = ["install", "refuse_or_note"]

_CHANGING = {"os.remove": (0,), "os.rename": (0, 1), "os.rmdir": (0,), "os.truncate": (0,), "shutil.rmtree": (0,)}
_CACHES = ("~/.cache", "~/.triton", "~/.config/matplotlib", "~/.nv")
_CACHE_VARIABLES = ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")
_seen: set[str] = set()


def install(recorder: Recorder) -> None:
    """Listen to what this process does to files."""
    free = [tempfile.gettempdir(), "/dev", "/proc", "/sys", "/run", recorder.settings.root, recorder.settings.facts]
    free += [os.path.expanduser(folder) for folder in _CACHES]
    free += [os.environ[name] for name in _CACHE_VARIABLES if os.environ.get(name)]
    allowed = tuple(os.path.realpath(folder) + os.sep for folder in free)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            if writes and isinstance(path, str | bytes | os.PathLike):
                _judge(recorder, path, allowed)
        elif event in _CHANGING:
            for position in _CHANGING[event]:
                _judge(recorder, arguments[position], allowed)

    recorder.refuse = lambda path: _judge(recorder, path, allowed)
    sys.addaudithook(hear)


def refuse_or_note(recorder: Recorder, path: object) -> None:
    """Judge a file that something other than Python is about to write."""
    if isinstance(path, str | os.PathLike):
        recorder.refuse(path)


def _judge(recorder: Recorder, path: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return
    name = os.path.realpath(os.fsdecode(path))
    if name.startswith(allowed) or name in _seen or name.endswith(".pyc") or "__pycache__" in name:
        return
    there = Path(name).exists()
    if not there:
        _seen.add(name)
    recorder.write(Wrote(path=name, refused=there, line=recorder.line()))
    if there:
        raise PermissionError(f"bigstep doctor keeps {name} as it is: it was there before this examination")
