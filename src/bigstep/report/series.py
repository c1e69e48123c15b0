"""Curves of a group of runs: one line a group, the median over its seeds with their range, at few points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bigstep.report.outcome import Outcome
from bigstep.report.words import number

__all__ = ["Line", "curve", "group_line"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """Points of one curve; low and high span the seeds and are empty for a single one."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


def curve(rows: Sequence[dict[str, Any]], x: str, y: str, most: int) -> tuple[Array, Array, Array]:
    """Take (samples, x, y) from rows that have all three; neighbours are averaged to leave at most `most` points."""
    points = []
    for row in rows:
        position, across, value = number(row.get("samples")), number(row.get(x)), number(row.get(y))
        if position is not None and across is not None and value is not None:
            points.append((position, across, value))
    table = np.array(points, dtype=np.float64).reshape(-1, 3)
    if y == "batch":
        table = table[~_dips(table[:, 2])]
    if len(table) > most:
        edges = np.linspace(0, len(table), most + 1).astype(int)
        table = np.add.reduceat(table, edges[:-1]) / np.diff(edges)[:, None]
    return table[:, 0], table[:, 1], table[:, 2]


def group_line(outcomes: Sequence[Outcome], kind: str, x: str, y: str, most: int) -> Line | None:
    """Draw a group as one line: at equal numbers of samples, the median of x and y over its runs.

    Args:
        outcomes: Runs that differ in the seed only.
        kind: Which rows: "train" or "evaluations".
        x: Column for the horizontal axis.
        y: Column for the vertical axis.
        most: The most points; where there are more, neighbours are averaged.

    Returns:
        The line, or None where no run has both columns.
    """
    found = [curve(getattr(outcome, kind), x, y, most) for outcome in outcomes]
    found = [run for run in found if len(run[0])]
    if not found:
        return None
    if len(found) == 1:
        return Line(_short(found[0][1]), _short(found[0][2]), [], [])
    grid = max((run[0] for run in found), key=len)
    # a run counts only between its first and its last row: nothing is extrapolated
    across, values = (
        np.array([np.interp(grid, run[0], run[column], left=np.nan, right=np.nan) for run in found])
        for column in (1, 2)
    )
    known = ~np.isnan(values).all(axis=0)
    across, values = across[:, known], values[:, known]
    return Line(
        _short(np.nanmedian(across, axis=0)),
        _short(np.nanmedian(values, axis=0)),
        _short(np.nanmin(values, axis=0)),
        _short(np.nanmax(values, axis=0)),
    )


def _dips(values: Array) -> npt.NDArray[np.bool_]:
    """Mark values below both neighbours: the incomplete batch at the end of an epoch is not a change of the batch."""
    if len(values) < 2:
        return np.zeros(len(values), dtype=np.bool_)
    before = np.concatenate([values[:1], values[:-1]])
    after = np.concatenate([values[1:], [np.inf]])
    marked: npt.NDArray[np.bool_] = (values < before) & (values < after)
    return marked


def _short(values: Array) -> list[float]:
    """Round to five digits: more than a chart shows, and they compress well."""
    return [float(f"{value:.5g}") for value in values]
