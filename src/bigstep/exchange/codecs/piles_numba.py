"""Exact sums on the CPU: a pass for the largest value of a parameter, one for its integers, compiled by Numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bigstep.exchange.codecs.levels import BROKEN, LEAST, LEVELS, WIDTH
from bigstep.exchange.codecs.onebit_numba import compiled
from bigstep.exchange.codecs.powers import NOT_FINITE

__all__ = ["add", "as_array", "decode", "encode", "find_exponents", "gather", "spread"]

_BITS: dict[Any, tuple[Any, int]] = {np.dtype(np.float32): (np.int32, 23), np.dtype(np.float64): (np.int64, 52)}


def as_array(flat: Any) -> Any:
    """A tensor of float32 or float64 as it is; one of half types as float32, which has all of their values."""
    return (flat.float() if flat.element_size() == 2 else flat).detach().numpy()


def _bits_of(values: Any) -> tuple[Any, Any, int]:
    """Floats as the integers that their digits are, the largest of them, and how many digits are behind the point."""
    integer, digits = _BITS[values.dtype]
    return values.view(integer), np.iinfo(integer).max, digits


def find_exponents(values: Any, sizes: Any) -> Any:
    """`bigstep.exchange.codecs.powers.find_exponents` of values that lie one behind the other."""
    out = np.empty(len(sizes), np.int32)
    bits, mask, digits = _bits_of(values)
    _find_exponents(bits, bits.dtype.type(mask), digits, sizes, out)
    return out


def add(values: Any, places: Any, offsets: Any, sums: Any, levels: Any, broken: Any, digits: int) -> int:
    """Add values of some parameters to sums, on the levels where they belong.

    Returns:
        The first of the parameters that needs another row, before which all are added; -1 if none does.
    """
    bits, mask, point = _bits_of(values)
    return int(_add(values, bits, bits.dtype.type(mask), point, places, offsets, sums, levels, broken, digits))


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
    values: Any, bits: Any, mask: Any, point: int, places: Any, offsets: Any, sums: Any, levels: Any, broken: Any,
    digits: int,
) -> int:  # fmt: skip
    first = 0
    for k in range(places.size):
        p = places[k]
        size = offsets[p + 1] - offsets[p]
        exponent = _exponent(bits[first : first + size], mask, point)
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
                part, factor = values[first : first + size], _power(digits - WIDTH * level)
                if row >= 0:
                    _accumulate(sums[row, offsets[p] : offsets[p + 1]], part, factor)
                else:
                    levels[free, p] = level
                    _write(sums[free, offsets[p] : offsets[p + 1]], part, factor)
        first += size
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
        size = offsets[p + 1] - offsets[p]
        for pair in range(pairs[k]):
            above, below = -1, -1
            for r in range(sums.shape[0]):
                if levels[r, p] == high[k] - 2 * pair:
                    above = r
                elif levels[r, p] == high[k] - 2 * pair - 1:
                    below = r
            _pair(sums, above, below, offsets[p], wire[at : at + size])
            at += size


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
def spread(wire: Any, sizes: Any, high: Any, pairs: Any, digits: int, out: Any) -> None:
    """Turn pairs of levels into values: each is rounded to float64, and low levels are added first."""
    at, first = 0, 0
    for k in range(sizes.size):
        size, rows = sizes[k], pairs[k]
        values = out[first : first + size]
        if rows == 0:
            values[:] = np.nan if high[k] == BROKEN else 0.0
        elif rows == 1:  # as nearly always
            _scale(wire[at : at + size], _power(WIDTH * (high[k] - 1) - digits), values)
        else:
            for i in range(size):
                total = 0.0
                for row in range(rows - 1, -1, -1):
                    scale = _power(WIDTH * (high[k] - 2 * row - 1) - digits)
                    total += np.float64(wire[at + row * size + i]) * scale
                values[i] = total
        at, first = at + rows * size, first + size


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
