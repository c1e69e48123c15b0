"""The levels on which piles of integers stand; see `piles`."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigstep.exchange.codecs.powers import spare_bits

__all__ = ["BITS", "BROKEN", "EMPTY", "LEAST", "LEVELS", "WIDTH", "exponent_above", "spans_of"]

BITS, WIDTH = 58, 4
"""Bits of a pile, and bits from one level to the next."""
LEVELS = 16
"""How many levels are kept, counted from the highest: 64 bits."""
LEAST = -240
"""The lowest level whose scale float64 can hold."""
BROKEN, EMPTY = 10_000, -10_000
"""The level of a part that is not finite, and that of a part of zeros."""


def spans_of(agreed: Any) -> tuple[Any, Any]:
    """Return the highest level of each parameter, and how many pairs of levels it takes on the wire.

    A parameter that is all zeros, or has no finite sum, takes none:

    >>> high, pairs = spans_of(np.array([3, -2, 5, -1, BROKEN, EMPTY, EMPTY, EMPTY]))
    >>> high.tolist(), pairs.tolist()
    ([3, 5, 10000, -10000], [1, 3, 0, 0])
    """
    high, minus_low = agreed.reshape(-1, 2).T.astype(np.int64, order="C")  # one memory layout: Numba compiles once
    pairs = (high - np.maximum(-minus_low, high - LEVELS + 1)) // 2 + 1
    return high, np.where((high == BROKEN) | (high == EMPTY), 0, pairs)


def exponent_above(high: int, parts: int) -> int:
    """Return an e such that |sums| of `parts` parts are below 2^e, given the highest level; large if it is BROKEN.

    >>> exponent_above(3, parts=7), exponent_above(BROKEN, parts=1) > 1024
    (15, True)
    """
    return WIDTH * high + spare_bits(parts)
