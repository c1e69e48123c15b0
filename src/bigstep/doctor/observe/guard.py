"""Keep the user's files unharmed: the program runs in a copy, and what it writes elsewhere is refused or reported.

Python's audit events announce every file that it opens for writing, removes or renames. A file outside the scratch copy
that was there before the examination must not be touched; new files are allowed and listed in the report. A file's age
is the time of its last change of status (ctime), which no copy and no `os.utime` can set back.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import tempfile
from typing import Any

from bigstep.doctor.facts import Wrote
from bigstep.doctor.observe.recorder import Recorder

__all__ = ["install"]

_CHANGING = {
    "os.remove": ((0, 1),), "os.rename": ((0, 2), (1, 3)), "os.rmdir": ((0, 1),), "os.truncate": ((0, None),),
    "shutil.rmtree": ((0, 1),),
}  # fmt: skip
"""By event, where its arguments hold each path, and the descriptor of the folder that this path starts from."""
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
            for path, folder in _CHANGING[event]:
                start = arguments[folder] if folder is not None and folder < len(arguments) else None
                _judge(recorder, _from_folder(arguments[path], start), allowed)

    recorder.judge_file = lambda path: _judge(recorder, path, allowed)
    sys.addaudithook(hear)


def _judge(recorder: Recorder, path: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(path, str | bytes | os.PathLike):
        return
    name = os.path.realpath(os.fsdecode(path))
    if name.startswith(allowed) or name in _seen or _is_renewable(name):
        return
    older = _holds_older(name, recorder.settings.began)
    temporary = name.startswith(os.path.realpath(tempfile.gettempdir()) + os.sep)
    if not older:
        _seen.add(name)
    if older or not temporary:
        recorder.write(Wrote(path=name, refused=older, line=recorder.line()))
    if older:
        raise PermissionError(f"bigstep doctor keeps {name} as it is: it was there before this examination")


def _from_folder(path: Any, descriptor: Any) -> Any:
    """Return in full, where that is known, a path that starts from an open folder (`dir_fd`, as in `shutil.rmtree`)."""
    if isinstance(descriptor, int) and descriptor >= 0 and isinstance(path, str | bytes | os.PathLike):
        with contextlib.suppress(OSError):  # only Linux lists open folders there
            return os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))
    return path


def _is_renewable(name: str) -> bool:
    """Whether a file holds nothing of its own: compiled Python, or an empty lock file (poetry.lock is not empty)."""
    if f"{os.sep}__pycache__{os.sep}" in name:
        return True
    return name.endswith(".lock") and os.path.isfile(name) and not os.path.getsize(name)


def _holds_older(name: str, began: float) -> bool:
    """Whether a file, or anything in a folder, is older than the examination; a new entry makes its folder look new."""
    try:
        if os.stat(name).st_ctime < began:
            return True
        return os.path.isdir(name) and any(
            os.lstat(os.path.join(folder, each)).st_ctime < began
            for folder, folders, files in os.walk(name)
            for each in (*folders, *files)
        )
    except OSError:
        return False  # not there, or gone meanwhile
