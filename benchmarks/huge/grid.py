"""A grid of rates that grows until its best lies inside, on the same budget for every system."""

from __future__ import annotations

from collections.abc import Generator

FACTOR = 2.0
MOST = 7
"""Rates of one system at one batch: a factor of 64 from end to end."""


def widening(middle: float, most: int = MOST, factor: float = FACTOR) -> Generator[float, float | None, float]:
    """Yield rates to try, each answered with its score (None for a run that failed); return the best rate.

    Three rates around the middle, then one more beyond whichever end is the best, until the best has a neighbour on
    either side or the budget is spent.

    >>> def tried(score, middle):
    ...     rates, trials = [], widening(middle)
    ...     rate = next(trials)
    ...     try:
    ...         while True:
    ...             rates.append(rate)
    ...             rate = trials.send(score(rate))
    ...     except StopIteration as end:
    ...         return rates, end.value
    >>> tried(lambda rate: -abs(rate - 9), middle=1.0)
    ([1.0, 0.5, 2.0, 4.0, 8.0, 16.0], 8.0)
    """
    scores: dict[float, float] = {}
    for rate in (middle, middle / factor, middle * factor):
        scores[rate] = _score((yield rate))
    while len(scores) < most:
        best, lowest, highest = max(scores, key=scores.__getitem__), min(scores), max(scores)
        if best == lowest:
            rate = lowest / factor
        elif best == highest:
            rate = highest * factor
        else:
            break
        scores[rate] = _score((yield rate))
    return max(scores, key=scores.__getitem__)


def _score(answer: float | None) -> float:
    return float("-inf") if answer is None else answer
