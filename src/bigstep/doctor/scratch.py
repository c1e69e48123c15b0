"""A scratch copy of the user's working directory, so that what the program writes never meets the user's files.

Small files are copied. Large files, and folders beyond the limits, are linked: they can be read, and the guard in each
process refuses to change what a link leads to.
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
    waiting = deque([(source, target)])
    files = size = 0
    while waiting:
        here, there = waiting.popleft()
        there.mkdir(parents=True, exist_ok=True)
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue  # the program cannot read it either
        for entry in entries:
            path, copy = Path(entry.path), there / entry.name
            if entry.name in _NEVER or path == target:
                continue
            full = files >= COPIED_FILES or size >= COPIED_BYTES
            if entry.is_dir(follow_symlinks=False) and not full and not _is_bulky(path):
                waiting.append((path, copy))
            elif entry.is_file(follow_symlinks=False) and not full and entry.stat().st_size <= LARGE_FILE:
                shutil.copy2(path, copy)
                files, size = files + 1, size + entry.stat().st_size
            else:
                copy.symlink_to(path.resolve() if entry.is_symlink() else path)


def _is_bulky(folder: Path) -> bool:
    """Whether a folder is better linked than copied: it has a usual name for data or results, and holds much."""
    if folder.name not in _LINKED:
        return False
    total = 0
    for count, path in enumerate(folder.rglob("*")):
        total += path.stat().st_size if path.is_file() else 0
        if count > 200 or total > LARGE_FILE:
            return True
    return False
