"""Passes over CSR rows that a slice of threads shares: check and count, sort hot columns first, multiply, meet."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigstep.kernels.atomics import compiled

__all__ = ["BAD_ORDER", "BAD_RANGE", "BAD_VALUE", "add_shares", "arrange_rows", "count_meetings", "multiply"]
__all__ += ["survey_rows"]

BAD_VALUE, BAD_RANGE, BAD_ORDER = 1, 2, 3


@compiled
def survey_rows(indptr: Any, indices: Any, values: Any, begin: int, end: int, n_features: int, counts: Any) -> Any:
    """Count in how many rows each column occurs; return (row, fault) of the first bad row, or (-1, 0)."""
    for row in range(begin, end):
        before = -1
        for j in range(indptr[row], indptr[row + 1]):
            column = indices[j]
            if column < 0 or column >= n_features:
                return row, BAD_RANGE
            if column <= before:
                return row, BAD_ORDER
            if not np.isfinite(values[j]):
                return row, BAD_VALUE
            before = column
            counts[column] += 1
    return -1, 0


@compiled
def arrange_rows(
    indptr: Any,
    indices: Any,
    values: Any,
    begin: int,
    end: int,
    place: Any,
    hot: int,
    new_indices: Any,
    new_values: Any,
    split: Any,
) -> None:
    """Copy rows with column c renamed to `place[c]`, those below `hot` first; `split` says where they end."""
    for row in range(begin, end):
        to = indptr[row]
        for j in range(indptr[row], indptr[row + 1]):
            column = place[indices[j]]
            if column < hot:
                new_indices[to] = column
                new_values[to] = values[j]
                to += 1
        split[row] = to
        for j in range(indptr[row], indptr[row + 1]):
            column = place[indices[j]]
            if column >= hot:
                new_indices[to] = column
                new_values[to] = values[j]
                to += 1


@compiled
def multiply(indptr: Any, indices: Any, values: Any, weights: Any, out: Any) -> None:
    """Add `rows @ weights` to `out` (float64); weights are features x outputs."""
    for row in range(out.shape[0]):
        for j in range(indptr[row], indptr[row + 1]):
            for k in range(out.shape[1]):
                out[row, k] += np.float64(values[j]) * weights[indices[j], k]


@compiled
def add_shares(indptr: Any, indices: Any, rows: Any, shares: Any, sums: Any) -> None:
    """Sum the shares of each row's columns."""
    for i in range(len(rows)):
        for j in range(indptr[rows[i]], indptr[rows[i] + 1]):
            sums[i] += shares[indices[j]]


@compiled
def count_meetings(indptr: Any, indices: Any, rows: Any, masks: Any, counts: Any) -> None:
    """Count for each bit in how many of the rows a column carries it."""
    for row in rows:
        met = np.uint64(0)
        for j in range(indptr[row], indptr[row + 1]):
            met |= masks[indices[j]]
        for bit in range(len(counts)):
            counts[bit] += np.int64((met >> np.uint64(bit)) & np.uint64(1))
