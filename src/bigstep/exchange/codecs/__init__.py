"""What is written on the wire: a file a kind, an entry each in `bigstep.tables.codecs`.

A codec turns a flat tensor into what travels and back. It knows nothing of ranks but their number, and nothing of
collectives or of what is carried from step to step.
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
    """What becomes of codes that are added."""

    parts: int
    """How many are added in all; a rank may add several."""
    divide_by: int = 1
    """By what the sum is divided: the number of ranks for a mean over ranks."""


class SummableCodec(Protocol):
    """A code whose sum over ranks is the code of the sum.

    Everywhere `flat` holds gradients of some parameters, one behind the other, `sizes` their numbers of values, and
    `agreed` is the maximum, over all parts, of what `measure` returned (None where nobody needs to agree).
    """

    def measure(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """A few integers of which all ranks need the maximum; asked for only where the table says that ranks agree."""

    def encode(self, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> Tensor:
        """What is added to the sum, one-dimensional and contiguous; may be `flat` itself, changed in place."""

    def decode(self, wire: Tensor, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> None:
        """Write the sum that was added up in `wire`, divided, into `flat`."""


@dataclass(frozen=True)
class Blocks:
    """Where blocks lie in a flat tensor and in a message; int64 tensors of one length, on the tensor's device."""

    starts: Tensor
    """First value of each block."""
    lengths: Tensor
    """Values of each block."""
    heads_at: Tensor
    """Where its head begins in the message seen as float32."""
    bodies_at: Tensor
    """First byte of its body in the message."""

    def as_arrays(self) -> tuple[Any, Any, Any, Any]:
        """Starts, lengths, heads and bodies for kernels on the CPU."""
        return self.starts.numpy(), self.lengths.numpy(), self.heads_at.numpy(), self.bodies_at.numpy()


def see_floats(message: Tensor) -> Tensor:
    """The whole float32 that a message holds."""
    return message[: message.numel() // 4 * 4].view(torch.float32)


class BlockCodec(Protocol):
    """A code that is written block by block and cannot be added; a head and a body as the table gives their sizes."""

    def encode(self, values: Tensor, kept: Tensor, blocks: Blocks, message: Tensor) -> None:
        """Write values + kept into `message` (bytes), and into `kept` what the code misses of them, both in place.

        A block with a value that is not finite is sent so that every receiver sees it, and keeps what was kept.
        """

    def decode(
        self, messages: Tensor, blocks: Blocks, out: Tensor, *, copies: int = 1, stride: int = 0, scale: float = 1
    ) -> None:
        """Write scale x the sum of `copies` messages, `stride` bytes apart, into the blocks of `out`.

        The sum is taken in the order of copies, so it has the same bits wherever it is taken.
        """
