"""Images held in memory: they are moved to the device once, and gathered and augmented there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from bigstep.data.device_memory import DeviceMemory, Take
from bigstep.data.pixels import count_values, moments
from bigstep.data.sources.base import Source, digest, spread
from bigstep.data.view import View, Way
from bigstep.errors import DataError

__all__ = ["TensorImages", "check_labels"]

_HASHED = 64  # samples whose content is part of a fingerprint


@dataclass(frozen=True, kw_only=True)
class TensorImages(Source):
    """Square images held in memory.

    Args:
        images: uint8 of shape (N, C, side, side).
        labels: int64 of shape (N,), each below len(classes).
        classes: names, by label.
        mean: of each channel, images scaled to 0..1.
        std: of each channel.
        name: what to call the set in a message; a path where it came from one.

    >>> tiny = TensorImages(images=torch.zeros(3, 1, 8, 8, dtype=torch.uint8), labels=torch.tensor([0, 1, 1]),
    ...                     classes=("cat", "dog"), mean=(0.5,), std=(0.25,), name="tiny")
    >>> len(tiny), tiny.image_size, tiny.subset(torch.tensor([2])).labels.tolist()
    (3, 8, [1])
    """

    unit = "images"
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str

    def __post_init__(self) -> None:
        shape = tuple(self.images.shape)
        if self.images.dtype != torch.uint8 or len(shape) != 4 or shape[2] != shape[3]:
            raise DataError(
                f"{self.name}: images must be uint8 of shape (N, C, side, side), not {self.images.dtype} of {shape}."
            )
        if not len(self.mean) == len(self.std) == shape[1]:
            raise DataError(
                f"{self.name}: {shape[1]} channels need as many means and deviations, "
                f"not {len(self.mean)} and {len(self.std)}."
            )
        check_labels(self.labels, shape[0], len(self.classes), self.name)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        """Channels of an image: 1 for grey, 3 for colour."""
        return self.images.shape[1]

    @property
    def image_size(self) -> int:
        """Side of an image in pixels."""
        return self.images.shape[3]

    def inputs(self, image_size: int) -> dict[str, int]:
        """Return channels and side of the images."""
        return {"channels": self.channels, "image_size": image_size or self.image_size}

    def subset(self, indices: Tensor) -> TensorImages:
        """Keep the samples at `indices`, in that order."""
        return replace(self, images=self.images[indices], labels=self.labels[indices])

    def feed(self, view: View) -> Way:
        """Keep the images on the device and augment them there."""
        images, labels = self.images.to(view.device), self.labels.to(view.device)

        def prepare(view: View) -> Take:
            augment = view.augmentation(self.mean, self.std)

            def take(indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
                return augment(images.index_select(0, indices), indices, epoch), labels.index_select(0, indices)

            return take

        return DeviceMemory(view, prepare)

    def fingerprint(self) -> str:
        """Hash all labels and some of the images."""
        return digest(*self.images.shape, self.labels, self.images[spread(len(self), _HASHED)])

    def describe(self, verify: bool) -> dict[str, Any]:
        """Count classes and describe the pixels of all images."""
        counts = self.labels.bincount(minlength=len(self.classes)).tolist()
        side = [self.image_size, self.image_size]
        histogram = torch.stack([count_values(self.images[:, channel]) for channel in range(self.channels)])
        return {
            "per_class": dict(zip(self.classes, counts, strict=True)),
            "sizes": {"smallest": side, "median": side, "largest": side},
            **moments(histogram),
            "checked": len(self),
            "corrupt": [],
        }

    def thumbnail(self, index: int, side: int) -> Image.Image:
        """Enlarge an image without smoothing its pixels."""
        pixels = self.images[index]
        image = Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous().numpy())
        return image.resize((side, side), Image.Resampling.NEAREST)


def check_labels(labels: Tensor, count: int, num_classes: int, where: str) -> None:
    """Refuse a set that is empty, has more or fewer labels than images, or a label that names no class."""
    if count == 0:
        raise DataError(f"{where} holds no images.")
    if len(labels) != count:
        raise DataError(f"{where} has {len(labels)} labels for {count} images; there must be one for each.")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        wrong = lowest if lowest < 0 else highest
        raise DataError(f"{where} has a label {wrong}, but its classes are numbered 0 to {num_classes - 1}.")
