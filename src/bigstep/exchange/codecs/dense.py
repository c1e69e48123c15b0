"""Gradients as floating-point values: in their own type, or in one of half the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bigstep.exchange.codecs import Sum
from bigstep.exchange.codecs.powers import find_exponents, make_power, spare_bits

__all__ = ["BrainHalf", "Half", "Whole"]


class Whole:
    """The gradients themselves, divided before the sum."""

    def __init__(self, settings: Mapping[str, float] | None = None) -> None:
        """Nothing can be set."""

    def measure(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """The exponent of the largest value, for a type whose range a sum could exceed."""
        return find_exponents([flat])

    def encode(self, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> Tensor:
        """Divide in place."""
        return flat.div_(rule.divide_by)

    def decode(self, wire: Tensor, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> None:
        """The sum was taken in place."""


class BrainHalf(Whole):
    """bfloat16: 8 significant bits of a value, and the range of float32, so that nothing overflows."""

    dtype = torch.bfloat16

    def encode(self, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> Tensor:
        """Divide in place, then round."""
        return flat.div_(rule.divide_by).to(self.dtype)

    def decode(self, wire: Tensor, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> None:
        """Widen."""
        if wire.data_ptr() != flat.data_ptr():
            flat.copy_(wire)


class Half(BrainHalf):
    """float16: few ranks divide before they round, as in bfloat16; many agree on a scale, and divide after the sum.

    With 2^e above every |value| of every rank and h = log2 of the number of ranks N, rounded up::

        sent = value * 2^k,   k = 15 - h - e,   mean = sum * 2^-k / N

    so that no partial sum exceeds 2^15 (float16 ends at 65,504), and values down to 2^-17 of the largest keep all their
    11 bits even among 4,096 ranks. If 1,024 ranks divided first, most gradients of a late epoch would be sent as 0; up
    to 16 ranks lose at most 4 of float16's 40 binades that way, and need not agree on anything.

    Reference:
        Akiba, Suzuki and Fukuda, Extremely Large Minibatch SGD, 2017 (fp16 exchange, float32 update).

    Differs from the paper:
        Its ranks do not agree on a scale; they rely on gradients that neither overflow nor vanish.
    """

    dtype = torch.float16

    def encode(self, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> Tensor:
        """Scale in place, then round."""
        if agreed is None:
            return super().encode(flat, sizes, agreed, rule)
        wide = flat if flat.dtype in _LARGEST_SHIFT else flat.float()
        return wide.mul_(make_power(_shift(agreed, rule.parts, wide.dtype), wide.dtype)).half()

    def decode(self, wire: Tensor, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> None:
        """Widen, scale back and divide."""
        if agreed is None:
            return super().decode(wire, flat, sizes, agreed, rule)
        wide = flat.copy_(wire) if flat.dtype in _LARGEST_SHIFT else wire.float()
        wide.mul_(make_power(-_shift(agreed, rule.parts, wide.dtype), wide.dtype) / rule.divide_by)
        if wide.data_ptr() != flat.data_ptr():
            flat.copy_(wide)


# exponents of powers of two that these types can hold
_LARGEST_SHIFT = {torch.float32: 126, torch.float64: 1000}


def _shift(agreed: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    """The exponent k; a value that is not finite stays so under any scale."""
    return (15 - spare_bits(parts) - agreed).clamp(-_LARGEST_SHIFT[dtype], _LARGEST_SHIFT[dtype])
