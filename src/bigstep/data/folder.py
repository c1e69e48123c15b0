"""An ImageNet-style folder: train/CLASS/*.JPEG and val/CLASS/*.JPEG, decoded as they are needed.

Files are found in sorted order, so a sample's index means the same file on every machine that holds a copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigstep.data.augment import resized_crop_boxes
from bigstep.data.decode import Box, centre_box, cut, cut_fast, image_sizes, open_image, whole_box
from bigstep.errors import DataError

__all__ = ["FolderImages", "open_folder", "rectangular_batches", "scan_folder"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
_STRIDE = 32  # sides of rectangles are multiples of it: a ResNet shrinks by 32
_MAX_ASPECT = 2.0  # a longer image is trimmed to this, lest one panorama make a batch of its own


@dataclass(frozen=True, kw_only=True)
class FolderImages:
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

    @property
    def channels(self) -> int:
        """Images of every kind are decoded to red, green and blue."""
        return 3

    @cached_property
    def sizes(self) -> Tensor:
        """Width and height of each image in pixels, (N, 2), read from the files' headers."""
        return image_sizes([self.path(index) for index in range(len(self))])

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self.root / os.fsdecode(self.files[index])

    def subset(self, indices: Tensor) -> FolderImages:
        """Keep the samples at `indices`, in that order."""
        return replace(self, files=self.files[indices.numpy()], labels=self.labels[indices])

    def load_crops(self, indices: list[int], size: int) -> Tensor:
        """Decode for evaluation: the short side shrunk to size / 0.875, then the centre of size x size."""
        return self._load(indices, (size, size), lambda _, width, height: centre_box(width, height))

    def load_random_crops(self, indices: list[int], size: int, seed: int, epoch: int, min_scale: float) -> Tensor:
        """Decode for training: a random resized crop of size x size that depends on (seed, epoch, index) alone.

        Boxes are drawn for all images at once, from the sizes in their headers, and moved to whole pixels.
        """
        sizes = torch.tensor([self._size(index) for index in indices])
        drawn = resized_crop_boxes(torch.tensor(indices), seed, epoch, sizes[:, 1], sizes[:, 0], min_scale)
        out = torch.empty(len(indices), size, size, 3, dtype=torch.uint8)
        for row, (left, top, width, height) in enumerate(drawn.T.tolist()):
            with open_image(self.path(indices[row])) as image:
                out[row] = cut_fast(image, (left, top, left + width, top + height), (size, size))
        return out.permute(0, 3, 1, 2)

    def load_rectangles(self, indices: list[int], shape: tuple[int, int]) -> Tensor:
        """Decode whole images, trimmed only as far as the aspect ratio of `shape` (width, height) asks."""
        return self._load(indices, shape, lambda _, width, height: whole_box(width, height, shape))

    def _load(self, indices: list[int], shape: tuple[int, int], box: Callable[[int, int, int], Box]) -> Tensor:
        out = np.empty((len(indices), shape[1], shape[0], 3), dtype=np.uint8)
        for row, index in enumerate(indices):
            with open_image(self.path(index)) as image:
                out[row] = cut(image, box(index, *image.size), shape)
        return torch.from_numpy(out).permute(0, 3, 1, 2)

    def _size(self, index: int) -> tuple[int, int]:
        with open_image(self.path(index)) as image:
            return image.size


def open_folder(path: Path) -> tuple[FolderImages, FolderImages]:
    """Open PATH/train and PATH/val, whose class folders must have the same names."""
    train, test = scan_folder(path / "train"), scan_folder(path / "val")
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
        images = [file for file in _entries(root / name, folders=False) if file.lower().endswith(SUFFIXES)]
        if not images:
            raise DataError(f"{root / name} holds no images ({', '.join(SUFFIXES)}); add some or remove the folder.")
        files.extend(os.fsencode(f"{name}/{image}") for image in images)
        counts.append(len(images))
    labels = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor(counts))
    return FolderImages(root=root, files=np.array(files, dtype=np.bytes_), labels=labels, classes=tuple(classes))


def _entries(folder: Path, *, folders: bool) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir() == folders)
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from None


def rectangle_of(width: int, height: int, size: int) -> tuple[int, int]:
    """Return the shape (width, height) at which an image is evaluated whole: short side `size`, long side in 32s.

    >>> rectangle_of(500, 375, 288), rectangle_of(375, 500, 288), rectangle_of(3000, 300, 288)
    ((384, 288), (288, 384), (576, 288))
    """
    aspect = min(max(width, height) / min(width, height), _MAX_ASPECT)
    long = max(round(size * aspect / _STRIDE) * _STRIDE, size)
    return (long, size) if width >= height else (size, long)


def rectangular_batches(source: FolderImages, size: int, batch: int) -> list[Tensor]:
    """Group all samples into batches of one shape each: every sample once, order by shape.

    The shape of a sample depends on that sample alone, so what it is evaluated at does not change with the batch or
    with the number of ranks.

    Args:
        source: the images to evaluate.
        size: the short side in pixels.
        batch: samples in a batch at most.

    Returns:
        Indices of each batch, int64.

    Reference: the rectangular validation of fast.ai's DAWNBench entry, 2018.
    Differs from it: shapes are in steps of 32 pixels instead of the mean of a batch, and nothing is cut off but what
    the rounding takes.
    """
    shapes = [rectangle_of(width, height, size) for width, height in source.sizes.tolist()]
    order = sorted(range(len(shapes)), key=lambda index: (shapes[index], index))
    groups: dict[tuple[int, int], list[int]] = {}
    for index in order:
        groups.setdefault(shapes[index], []).append(index)
    return [part for group in groups.values() for part in torch.split(torch.tensor(group), batch)]
