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

from bigstep.exchange.codecs.levels import BROKEN, EMPTY, LEAST, LEVELS, WIDTH
from bigstep.exchange.codecs.onebit_numba import compiled
from bigstep.exchange.codecs.powers import NOT_FINITE

__all__ = ["Where", "add", "decode", "encode", "find_exponents", "find_levels", "gather", "span", "spread", "take"]

_BLOCK = 2048
"""Values processed at a time, so that they stay in the core's nearest cache."""

_BITS: dict[Any, tuple[Any, int, Any]] = {
    torch.float32: (np.int32, 23, np.empty(0, np.float32)),
    torch.float64: (np.int64, 52, np.empty(0, np.float64)),
}


def find_exponents(flat: Tensor, sizes: Any) -> Any:
    """`bigstep.exchange.codecs.powers.find_exponents` of concatenated parameters."""
    out = np.empty(len(sizes), np.int32)
    integer, digits, _ = _BITS[flat.dtype]
    _find_exponents(flat.detach().numpy().view(integer), integer(np.iinfo(integer).max), digits, sizes, out)
    return out


@dataclass(frozen=True)
class Where:
    """Where tensors of one type lie: kernels take dozens of them at once, and an array of each would cost more."""

    addresses: Any
    """One row for each part."""
    like: Any
    """An empty array of their type."""
    bits: Any
    """An empty array of the integers that their bits are read as."""
    mask: Any
    """All bits of such an integer but the sign."""
    point: int
    """How many of its bits are those of the fraction."""

    @classmethod
    def of(cls, *parts: Sequence[Tensor]) -> Where:
        """Hazard: the tensors must stay alive as long as their addresses are used."""
        integer, digits, like = _BITS[parts[0][0].dtype]
        addresses = np.array([tensor.data_ptr() for part in parts for tensor in part], np.int64)
        mask = integer(np.iinfo(integer).max)
        return cls(addresses.reshape(len(parts), -1), like, np.empty(0, integer), mask, digits)


@intrinsic
def _pointer(_: Any, address: Any, like: Any) -> Any:
    """Turn an address into a pointer to the element type of an array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(address, like), generate


@compiled()
def _exponent(bits: Any, mask: Any, point: int) -> Any:
    """The bits of a float without its sign, read as an integer, grow with its magnitude, and NaN lies above infinity.

    So the largest value is a maximum of integers, which becomes vector instructions.
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
def find_levels(addresses: Any, bits_like: Any, mask: Any, point: int, sizes: Any, out: Any) -> None:
    """Write the level of each parameter in each of some parts."""
    for k in range(sizes.size):
        for j in range(addresses.shape[0]):
            out[j, k] = _level(carray(_pointer(addresses[j, k], bits_like), sizes[k]), mask, point)


@compiled()
def _level(bits: Any, mask: Any, point: int) -> Any:
    """The level of a part; BROKEN if it is not finite, EMPTY if it is all zeros."""
    exponent = _exponent(bits, mask, point)
    if exponent == NOT_FINITE:
        return BROKEN
    return EMPTY if exponent == -NOT_FINITE else max(-(-exponent // WIDTH), LEAST)


@compiled()
def span(levels: Any, broken: Any, places: Any, parts: Any, out: Any) -> None:
    """Write the highest level of each parameter and minus the lowest, over its rows and the parts that are in none."""
    for k in range(places.size):
        p, high, minus_low = places[k], EMPTY, EMPTY
        for r in range(levels.shape[0] + parts.shape[0]):
            level = levels[r, p] if r < levels.shape[0] else parts[r - levels.shape[0], k]
            if level != EMPTY:
                high, minus_low = max(high, level), max(minus_low, -level)
        if broken[p] or high == BROKEN:
            high, minus_low = BROKEN, EMPTY
        out[2 * k], out[2 * k + 1] = high, minus_low


@compiled()
def add(
    addresses: Any, like: Any, bits_like: Any, mask: Any, point: int, places: Any, offsets: Any, sums: Any, levels: Any,
    broken: Any, digits: int, begin: int,
) -> int:  # fmt: skip
    """Add parts of some parameters to rows of their levels.

    A parameter's parts are added one after another, while its row is in the core's cache.

    Returns:
        Where to begin again once there is another row, which this call lacked; -1 if all parts are added.
    """
    for i in range(begin, addresses.size):
        k, j = i // addresses.shape[0], i % addresses.shape[0]
        p = places[k]
        size = offsets[p + 1] - offsets[p]
        level = _level(carray(_pointer(addresses[j, k], bits_like), size), mask, point)
        if level == BROKEN:
            broken[p] = True
        elif level != EMPTY:
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
                    return i
                factor = _power(digits - WIDTH * level)
                values = carray(_pointer(addresses[j, k], like), size)
                if row >= 0:
                    _accumulate(sums[row, offsets[p] : offsets[p + 1]], values, factor, 1.0)
                else:
                    levels[free, p] = level
                    _write(sums[free, offsets[p] : offsets[p + 1]], values, factor)
    return -1


@compiled()
def _power(exponent: Any) -> float:
    return math.ldexp(1.0, exponent)


@compiled()
def _write(total: Any, values: Any, factor: float) -> None:
    for i in range(values.size):
        total[i] = np.int64(np.rint(np.float64(values[i]) * factor))


@compiled()
def _accumulate(total: Any, values: Any, factor: float, times: float) -> None:
    for i in range(values.size):
        total[i] += np.int64(np.rint(np.float64(values[i]) * factor) * times)  # exact: times is a power of two


@compiled()
def gather(
    sums: Any, levels: Any, places: Any, offsets: Any, high: Any, pairs: Any, digits: int, addresses: Any, parts: Any,
    like: Any, wire: Any,
) -> None:  # fmt: skip
    """Write the sums of some parameters in pairs of levels, high ones first, with parts that are in no row yet."""
    at = 0
    for k in range(places.size):
        first, size = offsets[places[k]], offsets[places[k] + 1] - offsets[places[k]]
        for pair in range(pairs[k]):
            rows = _find_pair(levels[:, places[k]], high[k] - 2 * pair)
            for begin in range(0, size, _BLOCK):
                out = wire[at + begin : at + min(begin + _BLOCK, size)]
                _pair(sums, rows[0], rows[1], first + begin, out)
                _add_parts(addresses[:, k], parts[:, k], like, size, begin, high[k] - 2 * pair, digits, out)
            at += size


@compiled()
def take(
    sums: Any, levels: Any, offsets: Any, high: Any, pairs: Any, digits: int, addresses: Any, parts: Any, like: Any,
    outs: Any, out_like: Any,
) -> None:  # fmt: skip
    """Turn the sums of all parameters, with parts that are in no row yet, into values."""
    scratch = np.empty(_BLOCK, np.int64)
    for p in range(high.size):
        size, one = offsets[p + 1] - offsets[p], np.array([p])
        values = carray(_pointer(outs[p], out_like), size)
        if pairs[p] == 1:
            rows = _find_pair(levels[:, p], high[p])
            for begin in range(0, size, _BLOCK):
                out = values[begin : begin + _BLOCK]
                total = scratch[: out.size]
                _pair(sums, rows[0], rows[1], offsets[p] + begin, total)
                _add_parts(addresses[:, p], parts[:, p], like, size, begin, high[p], digits, total)
                _spread_one(total, high[p], 1, digits, out)
        else:
            wire = np.empty(size * pairs[p], np.int64)
            mine = addresses[:, p : p + 1], parts[:, p : p + 1], like
            gather(sums, levels, one, offsets, high[p : p + 1], pairs[p : p + 1], digits, *mine, wire)
            _spread_one(wire, high[p], pairs[p], digits, values)


@compiled()
def _add_parts(
    addresses: Any, parts: Any, like: Any, size: int, begin: int, high: int, digits: int, total: Any
) -> None:
    """Add to a block of a pair of levels the same block of those parts that are on one of the two."""
    for j in range(parts.size):
        if parts[j] == high or parts[j] == high - 1:
            values = carray(_pointer(addresses[j], like), size)[begin : begin + total.size]
            times = 2.0**WIDTH if parts[j] == high else 1.0
            _accumulate(total, values, _power(digits - WIDTH * parts[j]), times)


@compiled()
def _find_pair(levels: Any, high: int) -> Any:
    """The rows that hold a level and the one below it; -1 if no row does."""
    above, below = -1, -1
    for r in range(levels.size):
        if levels[r] == high:
            above = r
        elif levels[r] == high - 1:
            below = r
    return above, below


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
def spread(wires: Any, sizes: Any, high: Any, pairs: Any, digits: int, addresses: Any, like: Any) -> None:
    """Turn pairs of levels, summed over wires, into values: each pair is rounded to float64, low levels come first."""
    at, length = 0, (sizes * pairs).sum()
    scratch = np.empty(_BLOCK, np.int64)
    for k in range(sizes.size):
        values, own = carray(_pointer(addresses[k], like), sizes[k]), sizes[k] * pairs[k]
        if wires.size == 1 or pairs[k] == 0:
            total = carray(_pointer(wires[0], scratch), length)[at : at + own]
            _spread_one(total, high[k], pairs[k], digits, values)
        elif pairs[k] == 1:
            for begin in range(0, sizes[k], _BLOCK):
                out = values[begin : begin + _BLOCK]
                total = scratch[: out.size]
                _add_wires(wires, length, at + begin, total)
                _spread_one(total, high[k], 1, digits, out)
        else:
            total = np.empty(own, np.int64)
            _add_wires(wires, length, at, total)
            _spread_one(total, high[k], pairs[k], digits, values)
        at += own


@compiled()
def _add_wires(wires: Any, length: int, first: int, total: Any) -> None:
    for w in range(wires.size):
        wire = carray(_pointer(wires[w], total), length)[first : first + total.size]
        if w == 0:
            total[:] = wire
        else:
            total += wire


@compiled()
def _spread_one(wire: Any, high: int, pairs: int, digits: int, values: Any) -> None:
    if pairs == 0:
        values[:] = np.nan if high == BROKEN else 0.0
    elif pairs == 1:  # nearly always
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
