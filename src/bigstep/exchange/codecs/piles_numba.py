"""Exact sums on the CPU: a pass for the largest value of a parameter, one for its integers, compiled by Numba."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from bigstep.exchange.codecs.levels import BROKEN, LEAST, LEVELS, WIDTH
from bigstep.exchange.codecs.onebit_numba import compiled
from bigstep.exchange.codecs.powers import NOT_FINITE

__all__ = ["Where", "add", "decode", "encode", "find_exponents", "gather", "spread", "take"]

_BITS: dict[Any, tuple[Any, int, Any]] = {
    torch.float32: (np.int32, 23, np.empty(0, np.float32)),
    torch.float64: (np.int64, 52, np.empty(0, np.float64)),
}


def find_exponents(flat: Tensor, sizes: Any) -> Any:
    """`bigstep.exchange.codecs.powers.find_exponents` of values that lie one behind the other."""
    out = np.empty(len(sizes), np.int32)
    integer, digits, _ = _BITS[flat.dtype]
    _find_exponents(flat.detach().numpy().view(integer), integer(np.iinfo(integer).max), digits, sizes, out)
    return out


@dataclass(frozen=True)
class Where:
    """Where tensors of one type lie: kernels take dozens of them at once, and an array of each would cost more."""

    addresses: Any
    like: Any
    """An empty array of their type."""
    bits: Any
    """One of the integers that their digits are."""
    point: int
    """How many digits are behind the point."""

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> Where:
        """Hazard: the tensors must outlive what is done at their addresses."""
        integer, digits, like = _BITS[tensors[0].dtype]
        return cls(np.array([tensor.data_ptr() for tensor in tensors], np.int64), like, np.empty(0, integer), digits)


def add(
    where: Where, places: Any, offsets: Any, sums: Any, levels: Any, broken: Any, digits: int, begin: int, clear: bool
) -> int:
    """Add values of some parameters to sums, on the levels where they belong.

    Returns:
        The first of the parameters that needs another row, before which all are added; -1 if none does.
    """
    mask = where.bits.dtype.type(np.iinfo(where.bits.dtype).max)
    values = where.addresses, where.like, where.bits, mask, where.point
    return int(_add(*values, places, offsets, sums, levels, broken, digits, begin, clear))


@intrinsic
def _pointer(_: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to what an array holds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), generate


@compiled()
def _exponent(bits: Any, mask: Any, point: int) -> Any:
    """The digits of floats without their sign rise with their size, and NaN lies above infinity.

    So the largest is a maximum of integers, which becomes vector instructions.
    """
    top = mask & bits.dtype.type(0)
    for i in range(bits.size):
        top = max(top, bits[i] & mask)
    if top == 0:
        return -NOT_FINITE
    biased, special = np.int64(top) >> point, np.int64(mask) >> point
    if biased == special:
        return NOT_FINITE
    if biased > 0:
        return biased - (special // 2 - 1)
    length, rest = 0, np.int64(top)
    while rest > 0:
        length, rest = length + 1, rest >> 1
    return length - (special // 2 - 1) - point


@compiled()
def _find_exponents(bits: Any, mask: Any, point: int, sizes: Any, out: Any) -> None:
    first = 0
    for p in range(sizes.size):
        out[p] = _exponent(bits[first : first + sizes[p]], mask, point)
        first += sizes[p]


@compiled()
def _add(
    addresses: Any, like: Any, bits_like: Any, mask: Any, point: int, places: Any, offsets: Any, sums: Any, levels: Any,
    broken: Any, digits: int, begin: int, clear: bool,
) -> int:  # fmt: skip
    for k in range(begin, places.size):
        p = places[k]
        size = offsets[p + 1] - offsets[p]
        values = carray(_pointer(addresses[k], like), size)
        exponent = _exponent(carray(_pointer(addresses[k], bits_like), size), mask, point)
        if exponent == NOT_FINITE:
            broken[p] = True
        elif exponent != -NOT_FINITE:
            level = max(-(-exponent // WIDTH), LEAST)
            top = level
            for r in range(sums.shape[0]):
                top = max(top, levels[r, p])
            if level > top - LEVELS:
                row, free = -1, -1
                for r in range(sums.shape[0]):
                    if levels[r, p] == level:
                        row = r
                    elif free < 0 and levels[r, p] <= top - LEVELS:  # empty, or too low to count
                        free = r
                if row < 0 and free < 0:
                    return k
                factor = _power(digits - WIDTH * level)
                if row >= 0:
                    _accumulate(sums[row, offsets[p] : offsets[p + 1]], values, factor)
                else:
                    levels[free, p] = level
                    _write(sums[free, offsets[p] : offsets[p + 1]], values, factor)
        if clear:
            values[:] = 0
    return -1


@compiled()
def _power(exponent: Any) -> float:
    return math.ldexp(1.0, exponent)


@compiled()
def _write(total: Any, values: Any, factor: float) -> None:
    for i in range(values.size):
        total[i] = np.int64(np.rint(np.float64(values[i]) * factor))


@compiled()
def _accumulate(total: Any, values: Any, factor: float) -> None:
    for i in range(values.size):
        total[i] += np.int64(np.rint(np.float64(values[i]) * factor))


@compiled()
def gather(sums: Any, levels: Any, places: Any, offsets: Any, high: Any, pairs: Any, wire: Any) -> None:
    """Write the sums of some parameters in pairs of levels, high ones first."""
    at = 0
    for k in range(places.size):
        p = places[k]
        length = (offsets[p + 1] - offsets[p]) * pairs[k]
        _gather_one(sums, levels[:, p], offsets[p], high[k], pairs[k], wire[at : at + length])
        at += length


@compiled()
def take(
    sums: Any, levels: Any, offsets: Any, high: Any, pairs: Any, digits: int, scratch: Any, addresses: Any, like: Any
) -> None:
    """Turn the sums of all parameters into values."""
    for p in range(high.size):
        size = offsets[p + 1] - offsets[p]
        wire = scratch[: size * pairs[p]]
        _gather_one(sums, levels[:, p], offsets[p], high[p], pairs[p], wire)
        _spread_one(wire, high[p], pairs[p], digits, carray(_pointer(addresses[p], like), size))


@compiled()
def _gather_one(sums: Any, levels: Any, first: int, high: int, pairs: int, wire: Any) -> None:
    size = wire.size // max(pairs, 1)
    for pair in range(pairs):
        above, below = -1, -1
        for r in range(sums.shape[0]):
            if levels[r] == high - 2 * pair:
                above = r
            elif levels[r] == high - 2 * pair - 1:
                below = r
        _pair(sums, above, below, first, wire[pair * size : (pair + 1) * size])


@compiled()
def _pair(sums: Any, above: int, below: int, first: int, out: Any) -> None:
    if above >= 0 and below >= 0:
        for i in range(out.size):
            out[i] = sums[above, first + i] * 2**WIDTH + sums[below, first + i]
    elif above >= 0:
        for i in range(out.size):
            out[i] = sums[above, first + i] * 2**WIDTH
    elif below >= 0:
        for i in range(out.size):
            out[i] = sums[below, first + i]
    else:
        out[:] = 0


@compiled()
def spread(wire: Any, sizes: Any, high: Any, pairs: Any, digits: int, addresses: Any, like: Any) -> None:
    """Turn pairs of levels into values: each is rounded to float64, and low levels are added first."""
    at = 0
    for k in range(sizes.size):
        length = sizes[k] * pairs[k]
        values = carray(_pointer(addresses[k], like), sizes[k])
        _spread_one(wire[at : at + length], high[k], pairs[k], digits, values)
        at += length


@compiled()
def _spread_one(wire: Any, high: int, pairs: int, digits: int, values: Any) -> None:
    if pairs == 0:
        values[:] = np.nan if high == BROKEN else 0.0
    elif pairs == 1:  # as nearly always
        _scale(wire, _power(WIDTH * (high - 1) - digits), values)
    else:
        for i in range(values.size):
            total = 0.0
            for row in range(pairs - 1, -1, -1):
                scale = _power(WIDTH * (high - 2 * row - 1) - digits)
                total += np.float64(wire[row * values.size + i]) * scale
            values[i] = total


@compiled()
def _scale(integers: Any, factor: float, out: Any) -> None:
    for i in range(out.size):
        out[i] = np.float64(integers[i]) * factor


@compiled()
def encode(values: Any, sizes: Any, power: Any, wire: Any) -> None:
    """Each parameter's values times its power of two, as integers."""
    first = 0
    for p in range(sizes.size):
        _write(wire[first : first + sizes[p]], values[first : first + sizes[p]], power[p])
        first += sizes[p]


@compiled()
def decode(wire: Any, sizes: Any, power: Any, out: Any) -> None:
    """Each parameter's integers, rounded to float64, times its power."""
    first = 0
    for p in range(sizes.size):
        _scale(wire[first : first + sizes[p]], power[p], out[first : first + sizes[p]])
        first += sizes[p]
