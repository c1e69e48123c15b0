"""Keep the user's files unharmed: the program runs in a copy, and what it writes elsewhere is refused or reported.

Python's audit events announce every file that it opens for writing, removes or renames. A file outside the scratch copy
that was there before the examination must not be touched; new files are allowed and listed in the report.
"""

from __future__ import annotations

import glob
import os
import sys
import tempfile
from typing import Any

from bigstep.doctor.facts import Wrote
from bigstep.doctor.observe.recorder import Recorder

__all__ = ["install"]

_CHANGING = {"os.remove": (0,), "os.rename": (0, 1), "os.rmdir": (0,), "os.truncate": (0,), "shutil.rmtree": (0,)}
_CACHES = ("~/.cache", "~/.triton", "~/.config/matplotlib", "~/.nv", f"{tempfile.gettempdir()}/torchinductor_*")
_CACHE_VARIABLES = ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_seen: set[str] = set()


def install(recorder: Recorder) -> None:
    """Listen to what this process does to files."""
    free = ["/dev", "/proc", "/sys", "/run", recorder.settings.root, recorder.settings.facts]
    free += [found for folder in _CACHES for found in glob.glob(os.path.expanduser(folder))]
    free += [os.environ[name] for name in _CACHE_VARIABLES if os.environ.get(name)]
    allowed = tuple(os.path.realpath(folder) + os.sep for folder in free)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            # tempfile announces the folder first, then the file that it opens in it
            if writes and isinstance(path, str | bytes | os.PathLike) and not os.path.isdir(path):
                _judge(recorder, path, allowed)
        elif event in _CHANGING:
            for position in _CHANGING[event]:
                _judge(recorder, arguments[position], allowed)

    recorder.judge_file = lambda path: _judge(recorder, path, allowed)
    sys.addaudithook(hear)


def _judge(recorder: Recorder, path: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return
    name = os.path.realpath(os.fsdecode(path))
    if name.startswith(allowed) or name in _seen or name.endswith((".pyc", ".lock")) or "__pycache__" in name:
        return
    try:
        older = os.stat(name).st_mtime < recorder.settings.began
    except OSError:
        older = False  # a new file
    temporary = name.startswith(os.path.realpath(tempfile.gettempdir()) + os.sep)
    if not older:
        _seen.add(name)
    if older or not temporary:
        recorder.write(Wrote(path=name, refused=older, line=recorder.line()))
    if older:
        raise PermissionError(f"bigstep doctor keeps {name} as it is: it was there before this examination")
