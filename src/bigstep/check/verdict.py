"""From figures to rows: helpers that all properties share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bigstep.check.observe import Vectors
from bigstep.check.report import Status

__all__ = ["PATH_BOUND", "ROUNDING_BOUND", "Verdict", "difference", "judged", "not_applicable"]

ROUNDING_BOUND = 1e-11
"""One gradient in float64: 1e-16 per operation, some thousands of operations, and a margin."""
PATH_BOUND = 1e-8
"""A path of about a dozen steps, along which rounding differences grow; faults are orders of magnitude larger."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a property says; the name is added to make a row of it."""

    status: Status
    figure: float | None = None
    bound: float | None = None
    measure: str = ""
    words: str = ""
    remedy: str = ""


def judged(figure: float, bound: float, measure: str, *, words: str = "", fault: str, remedy: str) -> Verdict:
    """Hold a figure to its bound.

    Args:
        figure: Measured; NaN fails.
        bound: The most it may be.
        measure: What the figure counts.
        words: What a reader should know where it holds.
        fault: What was seen where it fails.
        remedy: What to change where it fails.
    """
    if figure <= bound:
        return Verdict(status="pass", figure=figure, bound=bound, measure=measure, words=words)
    return Verdict(status="fail", figure=figure, bound=bound, measure=measure, words=fault, remedy=remedy)


def not_applicable(reason: str) -> Verdict:
    """Say why a property does not apply."""
    return Verdict(status="not applicable", words=reason)


def difference(left: Vectors, right: Vectors) -> tuple[float, str]:
    """Return the largest relative difference between tensors of the same names, and where it is.

    A tensor is measured against its own largest entry in `right`, or a thousandth of the largest entry of all tensors
    if that is more, so that rounding in a tensor of zeros does not count as a large difference.

    >>> difference({"a": np.array([1.0, 2.02])}, {"a": np.array([1.0, 2.0])})
    (0.010000000000000009, 'a')
    """
    if left.keys() != right.keys():
        return float("inf"), ", ".join(sorted(left.keys() ^ right.keys())[:3])
    overall = max((float(np.abs(value).max(initial=0.0)) for value in right.values()), default=0.0)
    worst, where = 0.0, ""
    for name, value in right.items():
        if not value.size:
            continue
        scale = max(float(np.abs(value).max()), 1e-3 * overall)
        apart = float(np.abs(left[name] - value).max())
        relative = apart / scale if scale else apart
        if not relative <= worst:  # NaN counts as the worst
            worst, where = (relative if relative == relative else float("inf")), name
    return worst, where
