"""A scratch copy of the user's working directory, so that what the program writes never meets the user's files.

Small files are copied. Large files, and folders beyond the limits, are linked: they can be read, and the guard in each
process refuses to change what a link leads to. Of a folder for data or results that holds much, each entry is linked,
so that new ones land in the copy, unless there are too many. New files below a linked folder are told by the guard.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from pathlib import Path

__all__ = ["copy_tree"]

COPIED_BYTES = 128 << 20
COPIED_FILES = 4000
LARGE_FILE = 16 << 20
_NEVER = {".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
_LINKED = {"node_modules", "venv", ".venv", "env", "data", "datasets", "runs", "wandb", "checkpoints"}


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder, level by level, until the limits are reached; link what is left."""
    waiting = deque([(source, target, False)])
    files = size = 0
    while waiting:
        here, there, linked = waiting.popleft()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            entries = []  # the program cannot read it either
        if linked and len(entries) > COPIED_FILES:
            there.symlink_to(here)
            continue
        there.mkdir(parents=True, exist_ok=True)
        for entry in entries:
            path, copy = Path(entry.path), there / entry.name
            if entry.name in _NEVER or path == target:
                continue
            full = linked or files >= COPIED_FILES or size >= COPIED_BYTES
            if entry.is_dir(follow_symlinks=False) and not full:
                waiting.append((path, copy, _is_bulky(path)))
            elif entry.is_file(follow_symlinks=False) and not full and entry.stat().st_size <= LARGE_FILE:
                shutil.copy2(path, copy)
                files, size = files + 1, size + entry.stat().st_size
            else:
                copy.symlink_to(path.resolve() if entry.is_symlink() else path)


def _is_bulky(folder: Path) -> bool:
    """Whether what a folder holds is better linked than copied: much, under a usual name for data or results."""
    if folder.name not in _LINKED:
        return False
    total = 0
    for count, path in enumerate(folder.rglob("*")):
        total += path.stat().st_size if path.is_file() else 0
        if count > 200 or total > LARGE_FILE:
            return True
    return False
