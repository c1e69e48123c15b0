"""One bucket of gradients, and what every way of exchanging it has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bigstep.exchange.codecs.piles import Piles
from bigstep.exchange.line import Steps
from bigstep.exchange.residuals import Residuals

__all__ = ["Bucket", "Transport"]


@dataclass(frozen=True)
class Bucket:
    """Gradients of some parameters, concatenated, as DDP hands them over."""

    flat: Tensor
    """One-dimensional and contiguous; the mean over ranks is written here."""
    names: tuple[str, ...]
    """Names of the parameters, in order."""
    shapes: tuple[torch.Size, ...]
    """Shapes of their gradients, in the same order."""
    step: int
    """How many backward passes ended before this one."""
    held: tuple[Tensor, ...] = ()
    """More parts of the sum, laid out as `flat`."""
    piles: Piles | None = None
    """The parts that this rank added before `flat`; None unless the sum has several parts."""
    places: tuple[int, ...] = ()
    """Indices of the parameters in `piles`."""

    @property
    def sizes(self) -> list[int]:
        """Number of values of each parameter."""
        return [shape.numel() for shape in self.shapes]


class Transport(Protocol):
    """Turns a bucket into its mean over ranks (for an exchange of parts, into their sum), in steps."""

    bytes_sent: float
    """By this rank, so far."""
    residuals: Residuals
    """What is carried from one step of training to the next."""

    def start(self, bucket: Bucket) -> Steps:
        """Put the mean or sum over ranks into the bucket; every rank starts the same buckets in the same order."""
