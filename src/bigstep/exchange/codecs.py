"""What happens to one bucket of gradients: the codecs that can be summed on the wire, and what all codecs share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bigstep.exchange.collectives import Collective
from bigstep.exchange.line import Steps
from bigstep.exchange.world import World

__all__ = ["HALF_TYPES", "Bucket", "Codec", "Dense"]

HALF_TYPES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Bucket:
    """Gradients of some parameters, one behind the other, as DDP hands them over."""

    flat: Tensor
    """One-dimensional and contiguous; the mean over ranks is written here."""
    names: tuple[str, ...]
    """Of the parameters, in order."""
    shapes: tuple[torch.Size, ...]
    """Of the parameters, in order."""
    step: int
    """How many backward passes ended before this one."""

    @property
    def sizes(self) -> list[int]:
        """Values of each parameter."""
        return [shape.numel() for shape in self.shapes]


class Codec(Protocol):
    """Turns a bucket into its mean over ranks, in steps; may carry something from one step of training to the next."""

    bytes_sent: float
    """By this rank, so far."""

    def start(self, bucket: Bucket) -> Steps:
        """Put the mean over ranks into the bucket; every rank starts the same buckets in the same order."""

    def scale(self, factor: float) -> None:
        """Multiply what is carried, for example when the loss is scaled by another number."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank carries, by parameter name."""

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """One state out of those of all ranks, from which `load` can serve any number of ranks."""

    def load(self, state: dict[str, Any]) -> None:
        """Carry on from this rank's `state_dict`, or from a merged one."""


class Dense:
    """Sum on the wire, in the gradients' own floating type or in half precision.

    Everything is divided by the number of ranks before it is encoded: then no partial sum of fp16 values leaves the
    range of the values themselves, however many ranks there are.

    Reference:
        Akiba, Suzuki and Fukuda, Extremely Large Minibatch SGD, 2017 (fp16 exchange, float32 update).
    """

    def __init__(self, world: World, collective: Collective, dtype: torch.dtype | None) -> None:
        self._world = world
        self._collective = collective
        self._dtype = dtype
        self.bytes_sent = 0.0

    def start(self, bucket: Bucket) -> Steps:
        """Divide, encode, sum, decode."""
        flat = bucket.flat.div_(self._world.size)
        wire = flat if self._dtype is None else flat.to(self._dtype)
        self.bytes_sent += self._collective.bytes_sent(wire)
        yield from self._collective.start(wire)
        if wire.data_ptr() != flat.data_ptr():
            flat.copy_(wire)

    def scale(self, factor: float) -> None:
        """Nothing is carried."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing is carried."""
        return {}

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Nothing is carried."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing is carried."""
