"""Parse the LIBSVM text format: `label index:value index:value ... # comment`, one example a line."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigstep.sparse.kernels.atomics import compiled

__all__ = ["BAD_INDEX", "BAD_LABEL", "NOT_FINITE", "NOT_SORTED", "TRUNCATED", "parse_lines"]

BAD_LABEL, TRUNCATED, BAD_INDEX, NOT_FINITE, NOT_SORTED = 1, 2, 3, 4, 5
_MAX_INDEX = 2**31 - 2
_TABLE = 10.0 ** np.arange(23)  # powers of ten that a double holds exactly


@compiled
def _is_space(byte: int) -> bool:
    return byte == 32 or byte == 9 or byte == 13


@compiled
def _number(text: Any, at: int, stop: int) -> Any:
    """Read a decimal number; return (found, value, position after it). NaN and infinity are read as NaN."""
    sign = 1.0
    if at < stop and (text[at] == 45 or text[at] == 43):  # - +
        sign = -1.0 if text[at] == 45 else 1.0
        at += 1
    if at < stop and (text[at] | 32 == 110 or text[at] | 32 == 105):  # n(an), i(nf)
        while at < stop and text[at] | 32 >= 97 and text[at] | 32 <= 122:
            at += 1
        return True, np.nan, at
    mantissa: Any = 0
    digits, power, seen, point = 0, 0, False, False
    while at < stop:
        byte = text[at]
        if byte >= 48 and byte <= 57:
            seen = True
            if digits < 18:  # more do not change a float32
                mantissa = mantissa * 10 + np.int64(byte - 48)
                digits += mantissa > 0
                power -= point
            else:
                power += not point
        elif byte == 46 and not point:
            point = True
        else:
            break
        at += 1
    if seen and at < stop and text[at] | 32 == 101:  # e
        at += 1
        negative = at < stop and text[at] == 45
        if at < stop and (text[at] == 45 or text[at] == 43):
            at += 1
        exponent: Any = 0
        seen = False
        while at < stop and text[at] >= 48 and text[at] <= 57:
            seen = True
            exponent = min(exponent * 10 + np.int64(text[at] - 48), 9999)
            at += 1
        power += -exponent if negative else exponent
    value = float(mantissa)
    while power > 22 and value < 1e300 and value > 0:
        value *= 1e22
        power -= 22
    while power < -22 and value > 0:
        value /= 1e22
        power += 22
    if value > 0 and power <= 22:
        value = value / _TABLE[-power] if power < 0 else value * _TABLE[power]
    return seen, sign * value, at


@compiled
def parse_lines(text: Any, labels: Any, indptr: Any, indices: Any, values: Any) -> Any:
    """Fill the arrays; return (fault or 0, its line counted from 1, rows, non-zeros, smallest index)."""
    size = len(text)
    at, line, rows, count, smallest = 0, 0, 0, 0, _MAX_INDEX
    indptr[0] = 0
    while at < size:
        line += 1
        stop = at
        while stop < size and text[stop] != 10:
            stop += 1
        following = stop + 1
        end = at
        while end < stop and text[end] != 35:  # a comment runs to the end of the line
            end += 1
        while at < end and _is_space(text[at]):
            at += 1
        if at == end:
            at = following
            continue
        found, label, at = _number(text, at, end)
        if not found or label != np.floor(label) or abs(label) > 2**53 or (at < end and not _is_space(text[at])):
            return BAD_LABEL, line, rows, count, smallest
        before = -1
        while True:
            while at < end and _is_space(text[at]):
                at += 1
            if at == end:
                break
            index: Any = 0
            first = at
            while at < end and text[at] >= 48 and text[at] <= 57:
                index = min(index * 10 + np.int64(text[at] - 48), _MAX_INDEX + 1)
                at += 1
            if at == end:
                return TRUNCATED, line, rows, count, smallest
            if at == first or text[at] != 58 or index > _MAX_INDEX:
                return BAD_INDEX, line, rows, count, smallest
            found, value, at = _number(text, at + 1, end)
            if not found or (at < end and not _is_space(text[at])):
                return TRUNCATED, line, rows, count, smallest
            if not np.isfinite(np.float32(value)):
                return NOT_FINITE, line, rows, count, smallest
            if index <= before:
                return NOT_SORTED, line, rows, count, smallest
            before = index
            smallest = min(smallest, index)
            indices[count] = index
            values[count] = value
            count += 1
        labels[rows] = label
        rows += 1
        indptr[rows] = count
        at = following
    return 0, line, rows, count, smallest
