"""What a run asks of its data: which samples, and how it wants to see them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bigstep.data.augment import Augment
from bigstep.data.waits import Waits

__all__ = ["Decoding", "Request", "View", "Way"]


@dataclass(frozen=True)
class Request:
    """A batch that the loop wants: samples of one epoch, by index."""

    epoch: int
    indices: Tensor
    """int64 of one dimension, on the CPU."""


@dataclass(frozen=True)
class Decoding:
    """Who decodes in a run."""

    name: str = "pillow"
    """One of `bigstep.tables.decoders.DECODERS`, `auto` resolved."""
    loaders_use: str = "pillow"
    """Who decodes the images that the device cannot keep up with."""
    share: float = 1.0
    """The part of the images that the device decodes at first."""
    least: float = 0.0
    """The part that it decodes at least, however much others help."""
    why: str = ""
    """One sentence for the first note of a run."""


@dataclass(frozen=True, kw_only=True)
class View:
    """How a run wants to see the samples of a source; `Feed` says what each field means."""

    train: bool
    seed: int = 0
    augment: str = "none"
    image_size: int = 0
    min_scale: float = 0.08
    shift: int = 4
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    loaders: int = 0
    rectangular: bool = False
    decoding: Decoding = Decoding()  # noqa: RUF009 - frozen

    @property
    def kind(self) -> str:
        """The augmentation that applies: none unless the samples are trained on."""
        return self.augment if self.train else "none"

    def augmentation(self, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()) -> Augment:
        """Return the augmentation that turns whole stored images into the network's input."""
        return Augment(
            kind=self.kind,
            seed=self.seed,
            image_size=self.image_size,
            mean=mean,
            std=std,
            dtype=self.dtype,
            min_scale=self.min_scale,
            shift=self.shift,
        )


class Way(Protocol):
    """A way of feeding: from memory on the device, or through loader processes."""

    @property
    def loaders(self) -> int | None:
        """Processes or threads that load; None if the samples are in memory."""

    @property
    def waits(self) -> Waits | None:
        """How long the device waited; None if the samples are in memory."""

    def see(self, view: View) -> None:
        """Use this view from the next call on; the device, the seed and the number of loaders stay as they are."""

    def __call__(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one batch for each request."""

    def close(self) -> None:
        """End what runs in the background; a later call starts it again."""
