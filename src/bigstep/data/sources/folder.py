"""An ImageNet-style folder: train/CLASS/*.JPEG and val/CLASS/*.JPEG, decoded as they are needed.

Files are found in sorted order, so a sample's index means the same file on every machine that holds a copy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bigstep.data.augment import Augment, resized_crop_boxes
from bigstep.data.decode import Box, centre_box, cut, cut_fast, image_sizes, open_image, whole_box
from bigstep.data.loaders import Chunk, Finish, Job, Loaders
from bigstep.data.pixels import count_values, moments
from bigstep.data.rectangles import rectangle_of, rectangular_batches
from bigstep.data.sources.base import Source, digest, spread
from bigstep.data.view import Request, View, Way
from bigstep.errors import ConfigError, DataError

__all__ = ["FolderImages", "open_folder", "scan_folder"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
_SAMPLE = 500  # files that are decoded for statistics, and looked at for a fingerprint, unless all are asked for
_STATISTICS_SIZE = 64  # side at which they are decoded, in pixels


@dataclass(frozen=True, kw_only=True)
class FolderImages(Source):
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

    unit = "images"
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

    def inputs(self, image_size: int) -> dict[str, int]:
        """Return channels and side of the images as they are shown."""
        return {"channels": self.channels, "image_size": image_size}

    def feed(self, view: View) -> Way:
        """Decode and crop in loader processes, because the crop decides how much is decoded; the rest on the device."""
        if not view.image_size:
            raise ConfigError(f"{self.name} has images of many sizes; set data.image_size, for example to 224.")

        def prepare(view: View) -> Finish:
            kind = "flip" if view.kind == "resized_crop" else view.kind
            return Augment(kind=kind, seed=view.seed, mean=self.mean, std=self.std, dtype=view.dtype)

        return Loaders(view, FolderJobs(self, view.seed), prepare, self.name)

    def batches(self, batch: int, view: View) -> list[Tensor]:
        """Divide all samples into batches: in order, or by shape if whole images are evaluated."""
        if _is_whole(view):
            return rectangular_batches(self.sizes, view.image_size, batch)
        return super().batches(batch, view)

    def fingerprint(self) -> str:
        """Hash the names of all files, their labels, and the sizes of some."""
        bytes_of = [self.path(index).stat().st_size for index in spread(len(self), _SAMPLE).tolist()]
        return digest(len(self), self.files, self.labels, tuple(bytes_of))

    def thumbnail(self, index: int, side: int) -> Image.Image:
        """Shrink the middle of an image."""
        try:
            with open_image(self.path(index)) as image:
                return Image.fromarray(cut(image, centre_box(*image.size, fraction=1.0), (side, side)))
        except DataError:
            return Image.new("RGB", (side, side), "red")  # a damaged file is meant to be seen

    def describe(self, verify: bool) -> dict[str, Any]:
        """Count classes, decode some files, or all of them, and describe their pixels."""
        chosen = spread(len(self), len(self) if verify else _SAMPLE).tolist()  # evenly over the classes
        sizes, corrupt, histogram = [], [], torch.zeros(3, 256, dtype=torch.int64)
        with ThreadPoolExecutor() as pool:  # decoding releases the interpreter's lock
            for index, seen in zip(chosen, pool.map(lambda index: self._examine(index, verify), chosen), strict=True):
                if isinstance(seen, str):
                    corrupt.append({"file": str(self.path(index)), "reason": seen})
                else:
                    sizes.append(seen[0])
                    histogram += seen[1]
        counts = self.labels.bincount(minlength=len(self.classes)).tolist()
        facts: dict[str, Any] = {"per_class": dict(zip(self.classes, counts, strict=True))}
        if sizes:
            by_area = sorted(sizes, key=lambda size: (math.prod(size), size))
            picks = {"smallest": by_area[0], "median": by_area[len(by_area) // 2], "largest": by_area[-1]}
            facts["sizes"] = {key: list(size) for key, size in picks.items()}
            facts.update(moments(histogram))
        return {**facts, "checked": len(chosen), "corrupt": corrupt}

    def _examine(self, index: int, verify: bool) -> tuple[tuple[int, int], Tensor] | str:
        """Return the size of an image and the counts of its pixels' values, or what is wrong with it."""
        try:
            with open_image(self.path(index)) as image:
                size = image.size
                if verify:
                    image.load()  # every pixel: a reduced decode can pass over damage
                pixels = cut(image, centre_box(*size, fraction=1.0), (_STATISTICS_SIZE, _STATISTICS_SIZE))
        except DataError as error:
            return str(error)
        return size, torch.stack([count_values(torch.from_numpy(pixels[..., c].copy())) for c in range(3)])

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


class FolderLook(NamedTuple):
    """How the files of a request are shown."""

    crop: Literal["random", "centre", "whole"]
    shape: tuple[int, int]
    """Width and height in pixels."""
    min_scale: float


class FolderJobs:
    """Decode files to uint8 images of one shape."""

    def __init__(self, source: FolderImages, seed: int) -> None:
        self.source, self.seed = source, seed

    def look(self, request: Request, view: View) -> FolderLook:
        """Choose crop and shape; whole images of a request have one shape, that of the first."""
        if _is_whole(view):
            width, height = self.source.sizes[request.indices[0]].tolist()
            return FolderLook("whole", rectangle_of(width, height, view.image_size), view.min_scale)
        crop: Literal["random", "centre"] = "random" if view.kind == "resized_crop" else "centre"
        return FolderLook(crop, (view.image_size, view.image_size), view.min_scale)

    def __getitem__(self, job: Job) -> Chunk:
        look: FolderLook = job.look
        try:
            if look.crop == "random":
                images = self.source.load_random_crops(job.indices, look.shape[0], self.seed, job.epoch, look.min_scale)
            elif look.crop == "whole":
                images = self.source.load_rectangles(job.indices, look.shape)
            else:
                images = self.source.load_crops(job.indices, look.shape[0])
        except DataError as error:
            return str(error)
        return images, self.source.labels[job.indices]


def _is_whole(view: View) -> bool:
    return view.rectangular and not view.train


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
