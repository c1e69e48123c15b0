"""What is written on the wire: one file per kind of code, with entries in `bigstep.tables.codecs`.

A codec turns a flat tensor into what travels and back. Of the ranks it knows only their number; of collectives and of
what is carried from step to step it knows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["BlockCodec", "Blocks", "Sum", "SummableCodec", "see_floats"]


@dataclass(frozen=True)
class Sum:
    """How many codes are added, and what their sum is divided by."""

    parts: int
    """How many are added in all; a rank may add several."""
    divide_by: int = 1
    """The number of ranks for a mean over ranks."""


class SummableCodec(Protocol):
    """A code whose sum over ranks is the code of the sum.

    In all methods `flat` holds the concatenated gradients of some parameters, `sizes` the number of values of each, and
    `agreed` is the maximum, over all parts, of what `measure` returned (None if no agreement is needed).
    """

    def measure(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """A few integers of which all ranks need the maximum; called only if the table says that ranks agree."""

    def encode(self, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> Tensor:
        """What is added to the sum, one-dimensional and contiguous; may be `flat` itself, changed in place."""

    def decode(self, wire: Tensor, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> None:
        """Write the sum in `wire`, divided as `rule` says, into `flat`."""


@dataclass(frozen=True)
class Blocks:
    """Where blocks lie in a flat tensor and in a message; int64 tensors of equal length, on the tensor's device."""

    starts: Tensor
    """Index of the first value of each block."""
    lengths: Tensor
    """Number of values of each block."""
    heads_at: Tensor
    """Where the head of each block begins in the message viewed as float32."""
    bodies_at: Tensor
    """First byte of the body of each block in the message."""

    def as_arrays(self) -> tuple[Any, Any, Any, Any]:
        """Starts, lengths, heads and bodies for kernels on the CPU."""
        return self.starts.numpy(), self.lengths.numpy(), self.heads_at.numpy(), self.bodies_at.numpy()


def see_floats(message: Tensor) -> Tensor:
    """View the bytes of a message as float32, without an incomplete value at its end."""
    return message[: message.numel() // 4 * 4].view(torch.float32)


class BlockCodec(Protocol):
    """A code written block by block, which cannot be added; the table gives the sizes of a block's head and body."""

    def encode(self, values: Tensor, kept: Tensor, blocks: Blocks, message: Tensor) -> None:
        """Write values + kept into `message` (bytes), and into `kept` what the code misses of them, both in place.

        A block with a value that is not finite is sent so that every receiver sees that; its `kept` does not change.
        """

    def decode(
        self, messages: Tensor, blocks: Blocks, out: Tensor, *, copies: int = 1, stride: int = 0, scale: float = 1
    ) -> None:
        """Write scale x the sum of `copies` messages, `stride` bytes apart, into the blocks of `out`.

        The copies are added in order, so the sum has the same bits wherever it is computed.
        """
