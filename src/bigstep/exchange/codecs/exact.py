"""Sums without rounding errors: gradients as 64-bit integers, whose sum has no order.

Integers can be added in any order, by any collective, over any number of ranks, and give the same bits. For each
parameter, with 2^e above every |value| of every part and h = log2 of the number of parts, rounded up::

    q = round(value * 2^k),   k = 62 - h - e,   sum = (q + q + ...) * 2^-k

A part is below 2^(62 - h), so no sum of them exceeds 2^62: overflow is impossible, whatever the values. Scaling by a
power of two changes no digit; the only rounding, to a multiple of 2^-k, is that of each value by itself, and at most
2^(h - 62) of the largest. The exponents e are integers too, and their maximum over ranks is exact.

If any rank has a value of a parameter that is not finite, the parameter comes back as NaN on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigstep.exchange.codecs import Sum
from bigstep.exchange.codecs.powers import NOT_FINITE, find_exponents, make_power, spare_bits

__all__ = ["Exact"]

_BITS = 62
# exponents whose scale float64 can hold; smaller values keep their digits down to 2^-1021 only
_LEAST, _MOST = -960, 1024


class Exact:
    """Gradients as 64-bit integers on a scale for each parameter that all ranks agree on; 8 bytes a value."""

    def __init__(self, settings: Mapping[str, float] | None = None) -> None:
        """Nothing can be set."""

    def measure(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """The exponent e of each parameter."""
        if not _on_host(flat):
            return find_exponents(list(flat.split_with_sizes(list(sizes))))
        return torch.from_numpy(_kernels().find_exponents(_as_floats(flat), np.array(sizes, np.int64)))

    def encode(self, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> Tensor:
        """The integer q of each value."""
        assert agreed is not None
        power = make_power(_shift(agreed, rule), torch.float64)
        if not _on_host(flat):
            return _scale(flat.double(), sizes, power).round_().long()
        wire = torch.empty(flat.numel(), dtype=torch.int64)
        _kernels().encode(_as_floats(flat).numpy(), np.array(sizes, np.int64), power.numpy(), wire.numpy())
        return wire

    def decode(self, wire: Tensor, flat: Tensor, sizes: Sequence[int], agreed: Tensor | None, rule: Sum) -> None:
        """The sum, rounded to float64, scaled back and divided there."""
        assert agreed is not None
        power = make_power(-_shift(agreed, rule), torch.float64) / rule.divide_by
        power = power.masked_fill(agreed == NOT_FINITE, torch.nan)
        if not _on_host(flat):
            flat.copy_(_scale(wire.double(), sizes, power))
            return
        values = _as_floats(flat)
        _kernels().decode(wire.numpy(), np.array(sizes, np.int64), power.numpy(), values.numpy())
        if values.dtype != flat.dtype:
            flat.copy_(values)


def _on_host(flat: Tensor) -> bool:
    return not flat.is_cuda


def _as_floats(flat: Tensor) -> Tensor:
    """Convert half types, which Numba does not support, to float32, which holds all of their values."""
    return (flat.float() if flat.element_size() == 2 else flat).detach()


def _kernels() -> Any:
    """Return the functions compiled for the CPU, which a run on a GPU need not load."""
    from bigstep.exchange.codecs import piles_numba

    return piles_numba


def _shift(agreed: Tensor, rule: Sum) -> Tensor:
    return _BITS - spare_bits(rule.parts) - agreed.clamp(_LEAST, _MOST)


def _scale(flat: Tensor, sizes: Sequence[int], factors: Tensor) -> Tensor:
    """Multiply the values of each parameter by its factor, in place."""
    for piece, factor in zip(flat.split_with_sizes(list(sizes)), factors.unbind(), strict=True):
        piece.mul_(factor)
    return flat
