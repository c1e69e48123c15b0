"""Piles of integers on the CPU: one pass for the largest value, one for the integers, compiled by Numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bigstep.exchange.codecs.onebit_numba import compiled
from bigstep.exchange.codecs.powers import NOT_FINITE

__all__ = ["accumulate", "find_exponent", "write"]

_SIGNLESS: dict[Any, tuple[Any, int]] = {
    np.dtype(np.float32): (np.int32, 0x7FFFFFFF),
    np.dtype(np.float64): (np.int64, 0x7FFFFFFFFFFFFFFF),
}


def find_exponent(values: Any) -> int:
    """`bigstep.exchange.codecs.powers.find_exponents` of one array.

    The digits of floats without their sign rise with their size, and NaN lies above infinity; so the largest is a
    maximum of integers, which becomes vector instructions.
    """
    integer, mask = _SIGNLESS[values.dtype]
    digits = np.array([_largest(values.view(integer), integer(mask))], integer)
    largest = float(digits.view(values.dtype)[0])
    if not largest < math.inf:
        return NOT_FINITE
    return math.frexp(largest)[1] if largest else -NOT_FINITE


@compiled()
def _largest(digits: Any, mask: Any) -> Any:
    top = digits.dtype.type(0)
    for i in range(digits.size):
        top = max(top, digits[i] & mask)
    return top


@compiled()
def write(total: Any, values: Any, factor: float) -> None:
    """The integers of a first part."""
    for i in range(values.size):
        total[i] = np.int64(np.rint(np.float64(values[i]) * factor))


@compiled()
def accumulate(total: Any, values: Any, factor: float) -> None:
    """Add the integers of a part."""
    for i in range(values.size):
        total[i] += np.int64(np.rint(np.float64(values[i]) * factor))
