"""What a run trains on and what it is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bigstep.data.augment import sample_uniform
from bigstep.data.sources.base import Source, digest
from bigstep.errors import DataError

__all__ = ["DataPair", "hold_out"]

_HOLDOUT = 11  # stream of the numbers that choose which samples are held out


@dataclass(frozen=True)
class DataPair:
    """A training set and what to evaluate on."""

    train: Source
    test: Source

    def fingerprint(self) -> str:
        """Return a hash that distinguishes these data from others."""
        return digest(self.train.fingerprint(), self.test.fingerprint())


def hold_out(train: Source, fraction: float, seed: int) -> DataPair:
    """Divide a training set in two: the larger part to train on, `fraction` of each class to evaluate on.

    Which samples are held out depends on the seed alone. A source whose labels are not known without reading it is
    treated as one class.

    >>> from bigstep.data import TensorImages
    >>> images = torch.zeros(40, 1, 2, 2, dtype=torch.uint8)
    >>> full = TensorImages(images=images, labels=torch.arange(40) % 4, classes=tuple("abcd"), mean=(0.0,), std=(1.0,),
    ...                     name="tiny")
    >>> pair = hold_out(full, 0.2, seed=0)
    >>> len(pair.train), pair.test.labels.bincount().tolist()
    (32, [2, 2, 2, 2])
    """
    everything = torch.arange(len(train))
    groups = [everything] if train.labels is None else _by_class(train.labels)
    chance = sample_uniform(seed, 0, everything, _HOLDOUT)
    held = torch.zeros(len(train), dtype=torch.bool)
    for group in groups:
        count = min(max(round(fraction * len(group)), 1), len(group) - 1)
        held[group[chance[group].argsort()[:count]]] = True
    if not held.any():
        raise DataError(f"No class has the two samples that are needed to hold out a fraction of {fraction}.")
    return DataPair(train.subset(everything[~held]), train.subset(everything[held]))


def _by_class(labels: Tensor) -> list[Tensor]:
    order = labels.argsort(stable=True)
    return [group for group in torch.split(order, labels.bincount().tolist()) if len(group)]
