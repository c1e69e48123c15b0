"""Images held in memory, and what every data set has in common.

Three kinds of source feed a run: `TensorImages` (in memory), `bigstep.data.folder.FolderImages` (files, decoded as they
are needed) and any map-style data set of a user's own, whose items are pairs (x, y).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor
from torch.utils.data import Subset

from bigstep.data.augment import sample_uniform
from bigstep.errors import DataError

__all__ = ["DataPair", "LabelledImages", "MapStyle", "TensorImages", "hold_out"]

_HOLDOUT = 11  # stream of the numbers that choose which samples are held out


class MapStyle(Protocol):
    """A data set with a length whose items, by index, are pairs (x, y)."""

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int, /) -> Any: ...  # noqa: D105


class LabelledImages(Protocol):
    """What `TensorImages` and `FolderImages` share."""

    @property
    def labels(self) -> Tensor:
        """The class of each sample, int64."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by label."""

    @property
    def name(self) -> str:
        """What to call the set in a message."""

    def __len__(self) -> int: ...  # noqa: D105

    def subset(self, indices: Tensor) -> Self:
        """Keep the samples at `indices`, in that order."""


@dataclass(frozen=True, kw_only=True)
class TensorImages:
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

    def subset(self, indices: Tensor) -> TensorImages:
        """Keep the samples at `indices`, in that order."""
        return replace(self, images=self.images[indices], labels=self.labels[indices])


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


@dataclass(frozen=True)
class DataPair:
    """What a run trains on and what it is evaluated on."""

    train: Any  # TensorImages, FolderImages or MapStyle; the feed looks at which
    test: Any


def hold_out(train: Any, fraction: float, seed: int) -> DataPair:
    """Divide a training set in two: the larger part to train on, `fraction` of each class to evaluate on.

    Which samples are held out depends on the seed alone. A user's own data set has no labels to look at, so there the
    fraction is of the whole.

    >>> images = torch.zeros(40, 1, 2, 2, dtype=torch.uint8)
    >>> full = TensorImages(images=images, labels=torch.arange(40) % 4, classes=tuple("abcd"), mean=(0.0,), std=(1.0,),
    ...                     name="tiny")
    >>> pair = hold_out(full, 0.2, seed=0)
    >>> len(pair.train), pair.test.labels.bincount().tolist()
    (32, [2, 2, 2, 2])
    """
    chance = sample_uniform(seed, 0, torch.arange(len(train)), _HOLDOUT)
    labels = getattr(train, "labels", None) if hasattr(train, "subset") else None
    groups = [torch.arange(len(train))] if labels is None else _by_class(labels)
    held = torch.zeros(len(train), dtype=torch.bool)
    for group in groups:
        count = min(max(round(fraction * len(group)), 1), len(group) - 1)
        held[group[chance[group].argsort()[:count]]] = True
    if not held.any():
        raise DataError(f"No class has the two samples that holding out a fraction of {fraction} takes.")
    take = cast(Callable[[Tensor], Any], getattr(train, "subset", lambda indices: Subset(train, indices.tolist())))
    return DataPair(take((~held).nonzero().flatten()), take(held.nonzero().flatten()))


def _by_class(labels: Tensor) -> list[Tensor]:
    order = labels.argsort(stable=True)
    return [group for group in torch.split(order, labels.bincount().tolist()) if len(group)]
