"""How a user names a data set: by name, by path, or by a function of their own. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bigstep.errors import DataError, nearest
from bigstep.tables.datasets import DATASETS

__all__ = ["IMAGE_SUFFIXES", "INDEX", "PLAN", "TEXT_SUFFIXES", "Packing", "Progress", "Wanted", "name_of_set"]

INDEX = "index.json"
"""The file that marks a folder of packed images."""

PLAN = "pack.json"
"""The file that marks a folder that is still being packed."""

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
"""Endings of file names by which images are recognised."""

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".txt.gz", ".txt.xz", ".md.gz", ".md.xz")
"""Endings of file names by which text is recognised."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a file, the bytes received so far and the bytes in all (0 where unknown)."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A data set as a configuration names it; `open_data` says what each field means."""

    name: str
    path: str = ""
    length: int = 128
    vocabulary: str = "bytes"
    alone: bool = False
    """Whether a training set without a test set is enough, because a part of it is held out."""
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where to pack a data set, and how."""

    out: Path
    side: int = 0
    """Images with a longer short side, in pixels, are shrunk to this; 0 keeps every byte of the files."""
    raw: bool = False
    """Store pixels instead of compressed images."""
    say: Callable[[str], None] = print
    """Called with a line as each file is complete."""
    on_the_way: Callable[[str], None] = lambda line: None
    """Called with a progress line after every few images; each line replaces the one before."""


def name_of_set(given: str, current: str = "embedded") -> tuple[str, str]:
    """Return (name, path) for what was given to `--data`.

    Args:
        given: A known name, `package.module:function`, or a path.
        current: The set that the configuration names; it decides where the files at a path leave the kind open.

    >>> name_of_set("cifar10")
    ('cifar10', '')
    """
    if given in DATASETS:
        if DATASETS[given].needs_path and os.path.exists(given):
            raise DataError(f"{given!r} is a kind of data and also a path here; write ./{given} for the path.")
        return given, ""
    path = Path(os.path.expanduser(given))  # Path.expanduser raises if there is no such user
    if not path.exists():
        module, colon, function = given.partition(":")
        if colon and function.isidentifier() and all(part.isidentifier() for part in module.split(".")):
            return given, ""
        if len(path.parts) > 1:  # clearly a path: no known name to suggest
            there = next(parent for parent in path.parents if parent.exists())
            missing = path.relative_to(there).parts[0]
            raise DataError(
                f"{given!r} does not exist: there is no {missing!r} in {there.absolute()}; correct the path."
            )
        raise DataError(f"{given!r} is neither a known set nor a path that exists: {nearest(given, DATASETS)}")
    return _kind(path, current), str(path)


def _kind(path: Path, current: str) -> str:
    """Recognise a set by the files it has."""
    if not path.is_dir():
        return "tokens" if path.suffix in (".tokens", ".npy") else "text"
    if (path / INDEX).is_file():
        return "packed"
    if (path / PLAN).is_file() and not (path / "train").exists():
        raise DataError(f"{path} is packed only in part; run the same `bigstep data pack` again to continue.")
    is_text = _has(path / "train", TEXT_SUFFIXES) or _has(path, TEXT_SUFFIXES)
    if is_text and not _has_class(path / "train"):
        return "text"
    if (path / "train").is_dir():
        return "imagenet" if current == "imagenet" else "folder"
    if any(path.glob("*data_batch_1*")) or any(path.glob("cifar-10-*")):
        return "cifar10"
    if any(path.glob("train-images-idx3-ubyte*")):
        return current if current in ("mnist", "fashion-mnist") else "fashion-mnist"
    if current in ("mnist", "fashion-mnist", "cifar10"):
        return current
    if _has_class(path):
        raise DataError(
            f"{path} holds the folders of the classes itself, but they must be in {path / 'train'} (and, to evaluate "
            f"on, in {path / 'val'}): move or link them there."
        )
    raise DataError(
        f"{path} is not a data set: it has neither train/ with a folder for each class, nor the files of CIFAR-10 "
        "(data_batch_1), nor those of MNIST (train-images-idx3-ubyte), nor text (*.txt, *.md)."
    )


def _has_class(folder: Path) -> bool:
    """Whether a folder contains a folder of images; a text file beside that is then a description, not data."""
    try:
        return any(_has(inner, IMAGE_SUFFIXES) for inner in folder.iterdir() if inner.is_dir())
    except OSError:
        return False


def _has(folder: Path, suffixes: tuple[str, ...]) -> bool:
    try:
        return any(file.name.lower().endswith(suffixes) for file in folder.iterdir())
    except OSError:  # not a folder, or not readable: opening it will report that
        return False
