"""What every source of samples can do. The feed, the catalogue and `bigstep data` rely on nothing else."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigstep.data.view import View, Way

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

__all__ = ["PADDING", "Source", "digest", "spread"]

PADDING = -100
"""A target that does not count: the default `ignore_index` of torch's cross-entropy."""


class Source(ABC):
    """Samples by index, what a model has to know about them, and how they get to a device."""

    unit = "samples"
    """What the samples are called, in the plural."""

    if TYPE_CHECKING:  # not at run time: a dataclass would take an inherited property for the default of a field

        @property
        def name(self) -> str:
            """What to call the source in a message; a path where it came from one."""

        @property
        def classes(self) -> tuple[str, ...]:
            """Names, by label; empty if there are none."""

        @property
        def labels(self) -> Tensor | None:
            """The class of each sample; None if the samples must be read to find it."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the samples."""

    @property
    def num_classes(self) -> int:
        """Count the classes, or the tokens of a vocabulary."""
        return len(self.classes)

    @abstractmethod
    def inputs(self, image_size: int) -> dict[str, int]:
        """Return {"channels", "image_size"} of images shown at this size (0: their own), or {"length"} of sequences."""

    def input_shape(self, image_size: int) -> tuple[int, ...]:
        """Return the shape of one sample as a network gets it, with images shown at this size (0: their own)."""
        inputs = self.inputs(image_size)
        return (inputs["length"],) if "length" in inputs else (inputs["channels"], *2 * (inputs["image_size"],))

    @abstractmethod
    def subset(self, indices: Tensor) -> Source:
        """Keep the samples at `indices`, in that order."""

    @abstractmethod
    def feed(self, view: View) -> Way:
        """Return what brings samples to a device."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash that distinguishes this set from others, wherever it is kept, without reading all of it."""

    @abstractmethod
    def describe(self, verify: bool) -> dict[str, Any]:
        """Return what `bigstep data` shows; `verify` reads every sample and lists those that cannot be read."""

    def batches(self, batch: int, view: View) -> list[Tensor]:
        """Divide all samples into batches of at most `batch`, each sample in one."""
        return list(torch.split(torch.arange(len(self)), batch))

    def targets(self, indices: Tensor) -> Tensor | None:
        """Count the targets of each of these samples, as int64; None means one in each."""
        return None

    def bytes(self, indices: Tensor) -> Tensor | None:
        """Count the bytes of text that the targets of each of these samples stand for; None if they are not text."""
        return None

    def check(self) -> None:  # noqa: B027 - most sources are checked as they are opened
        """Refuse samples that no model can take; reads all of them."""

    def check_images(self, model: str) -> None:  # noqa: B027 - most sources show images as every network takes them
        """Refuse samples that no network for images takes."""

    def keep(self, folder: Path) -> None:  # noqa: B027 - most sources have nothing to keep
        """Write into a run folder what is needed to read samples as this run does."""

    def thumbnail(self, index: int, side: int) -> Image.Image | None:
        """Return a sample as a small square picture; None if it is not a picture."""
        return None


def digest(*parts: str | int | tuple[int, ...] | Tensor | NDArray[Any]) -> str:
    """Hash numbers, words and arrays, in order; 16 hexadecimal digits.

    >>> digest("a", torch.tensor([1, 2])) == digest("a", np.array([1, 2])), digest(1, 23) == digest(12, 3)
    (True, False)
    """
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str | int | tuple):
            total.update(f"{part}\0".encode())
        else:
            array = part.cpu().numpy() if isinstance(part, Tensor) else part
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def spread(count: int, most: int) -> Tensor:
    """Return at most `most` of the numbers below `count`, evenly spread from the first to the last.

    >>> spread(10, 4).tolist(), spread(3, 4).tolist(), spread(10, 1).tolist()
    ([0, 3, 6, 9], [0, 1, 2], [0])
    """
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()
