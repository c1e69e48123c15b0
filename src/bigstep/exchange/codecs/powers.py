"""Powers of two: scales that change no digit of a value, found and made without leaving the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NOT_FINITE", "find_exponents", "make_power", "spare_bits"]

NOT_FINITE = 2000
"""Stands for the exponent of a value that is not finite: above all others, so that it wins a maximum."""

_INTEGERS = {torch.float32: (torch.int32, 127, 23), torch.float64: (torch.int64, 1023, 52)}


def find_exponents(pieces: list[Tensor]) -> Tensor:
    """For each tensor the smallest e with all |values| < 2^e, as int32; `NOT_FINITE` if one of them is not finite.

    A tensor that is empty or all zeros gives -2000, which loses every maximum.

    >>> find_exponents([torch.tensor([0.75, -3.0]), torch.zeros(2), torch.tensor([1.0, torch.inf])]).tolist()
    [2, -2000, 2000]
    """
    largest = torch.stack([_largest(piece) for piece in pieces]) if pieces else torch.zeros(0)
    exponents = torch.frexp(largest).exponent.int()
    exponents = exponents.masked_fill(largest == 0, -NOT_FINITE)
    return exponents.masked_fill(~torch.isfinite(largest), NOT_FINITE)


def make_power(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^e in a floating type, exactly, from exponents of normal numbers; torch's own pow may round.

    >>> make_power(torch.tensor([3, -126]), torch.float32).tolist()
    [8.0, 1.1754943508222875e-38]
    """
    integer, bias, digits = _INTEGERS[dtype]
    return ((exponents.to(integer) + bias) << digits).view(dtype)


def spare_bits(parts: int) -> int:
    """Bits of headroom with which a sum of `parts` parts stays in range: log2, rounded up.

    >>> spare_bits(1), spare_bits(1024), spare_bits(3456)
    (0, 10, 12)
    """
    return (parts - 1).bit_length()


def _largest(piece: Tensor) -> Tensor:
    if piece.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=piece.device)
    low, high = torch.aminmax(piece)  # NaN if any value is; a norm takes ten times as long
    return torch.maximum(-low, high).double()
