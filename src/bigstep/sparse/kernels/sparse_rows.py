"""Passes over slices of CSR rows: check and count, put hot columns first, multiply, count meetings.

Indices are made unsigned where they are used: negative ones, as Python means them, would cost a branch at each access.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bigstep.sparse.kernels.atomics import compiled

__all__ = ["BAD_ORDER", "BAD_RANGE", "BAD_VALUE", "add_shares", "arrange_rows", "count_meetings"]
__all__ += ["PAD", "mark_rows", "measure_rows", "multiply", "rename_rows", "sum_of_squares", "survey_rows"]

BAD_VALUE, BAD_RANGE, BAD_ORDER = 1, 2, 3
PAD = 4


@compiled
def survey_rows(indptr: Any, indices: Any, values: Any, begin: int, end: int, n_features: int, counts: Any) -> Any:
    """Count in how many rows each column occurs; return (row, fault) of the first bad row, or (-1, 0)."""
    for row in range(begin, end):
        start, stop = np.uint64(indptr[row]), np.uint64(indptr[row + 1])
        finite, inside, rising = True, True, True  # no branch, so that the loop vectorises
        for j in range(start, stop):
            finite &= np.isfinite(values[j])
            inside &= (indices[j] >= 0) & (indices[j] < n_features)
        for j in range(start + np.uint64(1), stop):
            rising &= indices[j] > indices[j - np.uint64(1)]
        if not (finite and inside and rising):
            return row, BAD_VALUE if not finite else BAD_RANGE if not inside else BAD_ORDER
        for j in range(start, stop):
            counts[np.uint32(indices[j])] += 1
    return -1, 0


@compiled
def _padded(count: int) -> int:
    return (count + PAD - 1) // PAD * PAD


@compiled
def measure_rows(indptr: Any, indices: Any, begin: int, end: int, is_hot: Any, split: Any, sizes: Any) -> None:
    """Count each row's hot columns (`split`) and all its columns (`sizes`), both padded as `arrange_rows` does."""
    for row in range(begin, end):
        count = 0
        for j in range(np.uint64(indptr[row]), np.uint64(indptr[row + 1])):
            count += is_hot[np.uint32(indices[j])]
        split[row] = _padded(count)
        sizes[row] = _padded(count) + _padded(indptr[row + 1] - indptr[row] - count)


@compiled
def arrange_rows(
    indptr: Any,
    indices: Any,
    values: Any,
    begin: int,
    end: int,
    place: Any,
    hot: int,
    starts: Any,
    split: Any,
    new_indices: Any,
    new_values: Any,
) -> None:
    """Copy rows with column c renamed to `place[c]`, those below `hot` before the others.

    Both parts are padded to a multiple of PAD, so that loops over them need no remainder; the padding repeats the last
    column with the value 0, which changes neither a sum nor a weight and touches no cache line that the row does not.
    """
    for row in range(begin, end):
        to, other = np.uint64(starts[row]), np.uint64(split[row])
        for j in range(np.uint64(indptr[row]), np.uint64(indptr[row + 1])):
            column = place[np.uint32(indices[j])]
            is_hot = np.uint64(column < hot)
            at = to if is_hot else other  # a select, not a branch: no processor can predict which columns are hot
            new_indices[at] = column
            new_values[at] = values[j]
            to += is_hot
            other += np.uint64(1) - is_hot
        while to < np.uint64(split[row]):
            new_indices[to] = new_indices[to - np.uint64(1)]
            new_values[to] = 0
            to += np.uint64(1)
        while other < np.uint64(starts[row + 1]):
            new_indices[other] = new_indices[other - np.uint64(1)]
            new_values[other] = 0
            other += np.uint64(1)


@compiled
def rename_rows(
    indptr: Any,
    indices: Any,
    values: Any,
    begin: int,
    end: int,
    place: Any,
    starts: Any,
    new_indices: Any,
    new_values: Any,
) -> None:
    """Do what `arrange_rows` does where no column is hot: without a select for each value, hence faster."""
    for row in range(begin, end):
        start, to = np.uint64(indptr[row]), np.uint64(starts[row])
        count = np.uint64(indptr[row + 1]) - start
        for j in range(count):
            new_indices[to + j] = place[np.uint32(indices[start + j])]
            new_values[to + j] = values[start + j]
        for j in range(to + count, np.uint64(starts[row + 1])):
            new_indices[j] = new_indices[j - np.uint64(1)]
            new_values[j] = 0


@compiled
def mark_rows(indptr: Any, indices: Any, rows: Any, masks: Any) -> None:
    """Set bit i in the masks of all columns of the i-th of the rows."""
    for i in range(len(rows)):
        for j in range(np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])):
            masks[np.uint32(indices[j])] |= np.uint64(1) << np.uint64(i)


@compiled
def sum_of_squares(indptr: Any, values: Any, rows: Any) -> float:
    """Return the sum of the squared values of some rows, in float64."""
    total = 0.0
    for row in rows:
        for j in range(np.uint64(indptr[row]), np.uint64(indptr[row + 1])):
            total += np.float64(values[j]) ** 2
    return total


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
        for j in range(np.uint64(indptr[rows[i]]), np.uint64(indptr[rows[i] + 1])):
            sums[i] += shares[np.uint32(indices[j])]


@compiled
def count_meetings(indptr: Any, indices: Any, rows: Any, masks: Any, counts: Any) -> None:
    """Count for each bit the rows with a column whose mask has it."""
    for row in rows:
        met = np.uint64(0)
        for j in range(np.uint64(indptr[row]), np.uint64(indptr[row + 1])):
            met |= masks[np.uint32(indices[j])]
        for bit in range(len(counts)):
            counts[bit] += np.int64((met >> np.uint64(bit)) & np.uint64(1))
