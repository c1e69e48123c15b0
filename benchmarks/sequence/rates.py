"""The search for a rate that `mini.py` and `books.py` share: rates a factor apart, until the best lies inside."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["best_power", "next_power"]

FIRST = (0, -1, 1)
"""Powers of the factor that every search begins with, beside its centre."""


def next_power(scores: Mapping[int, float | None], most: int = 6, centre: int = 0) -> int | None:
    """Return the next rate to try, as a power of the factor times the first rate; None once the search is over.

    It begins at `centre`, what was best in a like case. It is over when the best rate has a worse one on either side,
    or after `most` trials. A trial that diverged has no score, and counts as the worst.

    >>> next_power({}), next_power({0: 2.7, -1: 2.8, 1: 2.6}), next_power({0: 2.7, -1: 2.8, 1: 2.6, 2: None})
    (0, 2, None)
    >>> next_power({}, centre=2), next_power({2: 2.6, 1: 2.7, 3: 2.8}, centre=2)
    (2, None)
    """
    for power in FIRST:
        if centre + power not in scores:
            return centre + power
    best = best_power(scores)
    missing = [power for power in (best - 1, best + 1) if power not in scores]
    return missing[0] if missing and len(scores) < most else None


def best_power(scores: Mapping[int, float | None]) -> int:
    """Return the power with the lowest score."""
    return min(scores, key=lambda power: math.inf if scores[power] is None else float(scores[power] or 0.0))
