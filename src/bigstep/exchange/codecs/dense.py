"""Gradients in a floating type: their own, or one of half the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["BrainHalf", "Half", "Whole"]


class Whole:
    """The gradients themselves, divided by the number of ranks before the sum."""

    def __init__(self, settings: Mapping[str, float] | None = None) -> None:
        """Nothing can be set."""

    def measure(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """Nothing to agree on."""
        raise NotImplementedError

    def encode(self, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, ranks: int) -> Tensor:
        """Divide in place."""
        return flat.div_(ranks)

    def decode(self, wire: Tensor, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, ranks: int) -> None:
        """The sum was taken in place."""


class BrainHalf(Whole):
    """bfloat16: 8 bits of a value, and the range of float32, so that nothing leaves it."""

    dtype = torch.bfloat16

    def encode(self, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, ranks: int) -> Tensor:
        """Divide in place, then round."""
        return flat.div_(ranks).to(self.dtype)

    def decode(self, wire: Tensor, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, ranks: int) -> None:
        """Widen."""
        if wire.data_ptr() != flat.data_ptr():
            flat.copy_(wire)


class Half(BrainHalf):
    """float16: divided before it is rounded, so that no partial sum leaves the range of the values themselves.

    Reference:
        Akiba, Suzuki and Fukuda, Extremely Large Minibatch SGD, 2017 (fp16 exchange, float32 update).
    """

    dtype = torch.float16
