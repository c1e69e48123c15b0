"""An ImageNet-style folder: train/CLASS/*.JPEG and val/CLASS/*.JPEG, decoded as they are needed.

Files are found in sorted order, so a sample's index means the same file on every machine that holds a copy.
"""

from __future__ import annotations

import io
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bigstep.data.decode import image_sizes, open_image
from bigstep.data.decoders.base import Buffer
from bigstep.data.decoders.plain import plain_size
from bigstep.data.names import IMAGE_SUFFIXES
from bigstep.data.sources.base import digest, spread
from bigstep.data.sources.coded import CodedImages
from bigstep.errors import DataError

__all__ = ["FolderImages", "open_folder", "scan_folder"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images
_LOOKED_AT = 500  # files whose size is part of a fingerprint


@dataclass(frozen=True, kw_only=True)
class FolderImages(CodedImages):
    """Labelled image files.

    Args:
        root: the folder above the class folders.
        files: CLASS/NAME of each file, as an array of bytes: a million Python strings would be copied into every
            loader process, one reference count at a time.
        labels: int64, by file.
        classes: names of the class folders, sorted.
        mean: of each channel, images scaled to 0..1.
        std: of each channel.
    """

    root: Path
    files: NDArray[np.bytes_]
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    def __len__(self) -> int:
        return len(self.files)

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.root)

    @cached_property
    def sizes(self) -> Tensor:
        """Width and height of each image in pixels, (N, 2), read from the files' headers."""
        return image_sizes(self.path(index) for index in range(len(self)))

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self.root / os.fsdecode(self.files[index])

    def where(self, index: int) -> str:
        """Return the file of a sample as a string."""
        return str(self.path(index))

    def content(self, index: int) -> bytes:
        """Read the file of a sample."""
        path = os.path.join(self._root, os.fsdecode(self.files[index]))  # pathlib takes longer than opening the file
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise DataError(f"{path} cannot be decoded: {error.strerror}.") from None

    def contents(self, indices: list[int], room: memoryview | None = None) -> list[Buffer]:
        """Read the files of some samples; those that cannot be read in one go are read, or refused, one by one."""
        found: list[Buffer] = []
        if room is not None:
            from bigstep.data.reading import read_files  # Numba takes a second to import

            root = os.fsencode(self._root) + b"/"
            found += read_files([root + name for name in self.files[indices].tolist()], room)
        return found + [self.content(index) for index in indices[len(found) :]]

    def open(self, index: int, content: Buffer | None = None) -> AbstractContextManager[Image.Image]:
        """Open the file of a sample."""
        return open_image(self.path(index), None if content is None else io.BytesIO(content))

    def size(self, index: int, content: Buffer | None = None) -> tuple[int, int]:
        """Read width and height from the header of a file."""
        if content is not None and (known := plain_size(content)) is not None:  # true of most JPEGs
            return known
        with self.open(index, content) as image:
            return image.size

    @cached_property
    def _root(self) -> str:
        return str(self.root)

    def subset(self, indices: Tensor) -> FolderImages:
        """Keep the samples at `indices`, in that order."""
        return replace(self, files=self.files[indices.numpy()], labels=self.labels[indices])

    def fingerprint(self) -> str:
        """Hash the names of all files, their labels, and the sizes of some."""
        chosen = spread(len(self), _LOOKED_AT).tolist()
        try:
            bytes_of = [self.path(index).stat().st_size for index in chosen]
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None
        return digest(len(self), self.files, self.labels, tuple(bytes_of))


def open_folder(path: Path) -> tuple[FolderImages, FolderImages]:
    """Open PATH/train and PATH/val, whose class folders must have the same names."""
    train = scan_folder(path / "train")
    if not (path / "val").exists():
        raise DataError(
            f"{path} has no val beside train to evaluate on; add val/CLASS/IMAGE.JPEG (a link will do), or set "
            "data.holdout, the fraction of train that is held out for it."
        )
    test = scan_folder(path / "val")
    if train.classes != test.classes:
        extra = sorted(set(train.classes) ^ set(test.classes))
        here, there = (train.root, test.root) if extra[0] in train.classes else (test.root, train.root)
        raise DataError(
            f"{here / extra[0]} has no counterpart in {there} ({len(extra)} class folders differ); "
            "train and val must hold the same classes."
        )
    return train, test


def scan_folder(root: Path) -> FolderImages:
    """Find the images of ROOT/CLASS/*, in sorted order.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("dog/b.jpg", "dog/a.jpg", "cat/c.jpg"):
    ...         (Path(folder) / name).parent.mkdir(exist_ok=True)
    ...         Image.new("L", (60, 40)).save(Path(folder) / name)
    ...     found = scan_folder(Path(folder))
    ...     found.files.tolist(), found.labels.tolist(), found.load_crops([0], size=32).shape
    ([b'cat/c.jpg', b'dog/a.jpg', b'dog/b.jpg'], [0, 1, 1], torch.Size([1, 3, 32, 32]))
    """
    classes = _entries(root, folders=True)
    if not classes:
        raise DataError(f"{root} holds no class folders; expected {root / 'CLASS' / 'IMAGE.JPEG'}.")
    files: list[bytes] = []
    counts = []
    for name in classes:
        images = [file for file in _entries(root / name, folders=False) if file.lower().endswith(IMAGE_SUFFIXES)]
        if not images:
            kinds = ", ".join(IMAGE_SUFFIXES)
            raise DataError(f"{root / name} holds no images ({kinds}); add some or remove the folder.")
        files.extend(os.fsencode(f"{name}/{image}") for image in images)
        counts.append(len(images))
    labels = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor(counts))
    return FolderImages(root=root, files=np.array(files, dtype=np.bytes_), labels=labels, classes=tuple(classes))


def _is_broken_link(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry.path)


def _entries(folder: Path, *, folders: bool) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
            for entry in shown if folders else ():
                if _is_broken_link(entry):  # perhaps a class whose disk is missing
                    raise DataError(f"{entry.path} is a link to nowhere; mend or remove it.")
            # a broken link to a file is reported when it is read; a pipe is left out: reading it could wait for ever
            return sorted(e.name for e in shown if (e.is_dir() if folders else e.is_file() or _is_broken_link(e)))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from None
