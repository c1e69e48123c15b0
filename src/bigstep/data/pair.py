"""What a run trains on and what it is evaluated on.

Three kinds of source feed a run: `TensorImages` (in memory), `FolderImages` (files, decoded as they are needed) and any
map-style data set of a user's own, whose items are pairs (x, y).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Subset

from bigstep.data.augment import sample_uniform
from bigstep.data.folder import FolderImages
from bigstep.data.images import TensorImages
from bigstep.errors import DataError

__all__ = ["DataPair", "MapStyle", "Source", "hold_out"]

_HOLDOUT = 11  # stream of the numbers that choose which samples are held out


class MapStyle(Protocol):
    """A data set with a length whose items, by index, are pairs (x, y)."""

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int, /) -> Any: ...  # noqa: D105


Source = TensorImages | FolderImages | MapStyle


@dataclass(frozen=True)
class DataPair:
    """A training set and what to evaluate on."""

    train: Source
    test: Source


def hold_out(train: Source, fraction: float, seed: int) -> DataPair:
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
    everything = torch.arange(len(train))
    groups = _by_class(train.labels) if isinstance(train, TensorImages | FolderImages) else [everything]
    chance = sample_uniform(seed, 0, everything, _HOLDOUT)
    held = torch.zeros(len(train), dtype=torch.bool)
    for group in groups:
        count = min(max(round(fraction * len(group)), 1), len(group) - 1)
        held[group[chance[group].argsort()[:count]]] = True
    if not held.any():
        raise DataError(f"No class has the two samples that holding out a fraction of {fraction} takes.")
    return DataPair(_take(train, everything[~held]), _take(train, everything[held]))


def _take(source: Source, indices: Tensor) -> Source:
    if isinstance(source, TensorImages | FolderImages):
        return source.subset(indices)
    return Subset(source, indices.tolist())  # type: ignore[arg-type]  # any map-style set will do


def _by_class(labels: Tensor) -> list[Tensor]:
    order = labels.argsort(stable=True)
    return [group for group in torch.split(order, labels.bincount().tolist()) if len(group)]
