"""Examples as compressed sparse rows, from SciPy matrices, plain arrays or dense arrays, checked on entry."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigstep.errors import DataError
from bigstep.sparse.kernels.hogwild import CHUNK, ROUND
from bigstep.sparse.kernels.sparse_rows import (
    BAD_RANGE,
    BAD_VALUE,
    PAD,
    arrange_rows,
    measure_rows,
    multiply,
    rename_rows,
    sum_of_squares,
    survey_rows,
)
from bigstep.sparse.threads import Threads

__all__ = ["Arranged", "Rows", "arrange", "as_rows", "survey"]

HOT_FLOATS = 32768  # a thread's own copy of the hot columns: 128 KiB, which second-level caches hold


@dataclasses.dataclass(frozen=True)
class Rows:
    """CSR arrays of a fixed type: values float32, indices int32, indptr int64."""

    values: NDArray[np.float32]
    indices: NDArray[np.int32]
    indptr: NDArray[np.int64]
    n_features: int

    @property
    def n_rows(self) -> int:
        """Number of examples."""
        return len(self.indptr) - 1

    def mean_square(self) -> float:
        """Return the mean squared length of about 1,000 rows, spread evenly over all."""
        spread = np.arange(0, self.n_rows, max(1, self.n_rows // 1000))
        return float(sum_of_squares(self.indptr, self.values, spread)) / len(spread)

    def times(self, weights: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Multiply by a matrix of features x outputs."""
        out = np.zeros((self.n_rows, weights.shape[1]))
        multiply(self.indptr, self.indices, self.values, np.ascontiguousarray(weights, dtype=np.float64), out)
        return out


@dataclasses.dataclass(frozen=True)
class Arranged:
    """Rows as the kernels want them: columns renamed by falling frequency (0 is the intercept), hot ones first.

    A row is `starts[row]..starts[row + 1]`, its hot columns end at `split[row]`; both parts are padded with zeros.
    Indices have 16 bits where that is enough.
    """

    starts: NDArray[np.int64]
    split: NDArray[np.int64]
    indices: NDArray[np.unsignedinteger[Any]]
    values: NDArray[np.float32]
    place: NDArray[np.int32]
    hot: int
    longest: int


def as_rows(X: Any) -> Rows:
    """Accept a SciPy sparse matrix, `(data, indices, indptr, n_features)` or anything that NumPy reads as 2-D.

    Unsorted or duplicate indices are sorted and summed in a SciPy matrix, where they mean that, and refused elsewhere.
    """
    if isinstance(X, Rows):
        return X
    if hasattr(X, "tocsr"):
        if len(X.shape) != 2:
            raise DataError(f"The examples must be rows x features, but the sparse array has the shape {X.shape}.")
        X = X.tocsr()
        if not X.has_canonical_format:  # legal in SciPy, where duplicates mean their sum
            X = X.copy()
            X.sum_duplicates()
        return _checked(X.data, X.indices, X.indptr, int(X.shape[1]))
    if isinstance(X, tuple) and len(X) == 4 and isinstance(X[3], numbers.Integral):
        return _checked(*X)
    return _from_dense(X)


def _checked(data: Any, indices: Any, indptr: Any, n_features: int) -> Rows:
    data, indices, indptr = np.asarray(data), np.asarray(indices), np.asarray(indptr)
    if not data.ndim == indices.ndim == indptr.ndim == 1 or any(
        len(ints) and ints.dtype.kind not in "iu" for ints in (indices, indptr)
    ):
        raise DataError(
            "The CSR arrays must be flat, and indices and indptr whole numbers; build them with scipy.sparse."
        )
    if np.iscomplexobj(data):
        raise DataError("Complex data not supported: the examples have complex values; give real numbers.")
    if len(indptr) == 0 or indptr[0] != 0 or np.any(indptr[1:] < indptr[:-1]):  # unsigned differences are never < 0
        raise DataError("The CSR row starts (indptr) must begin with 0 and never fall; build them with scipy.sparse.")
    if not len(data) == len(indices) == indptr[-1]:
        raise DataError(
            f"The CSR arrays do not fit together: {len(data)} values, {len(indices)} indices, but the rows end at "
            f"{indptr[-1]}; all three must agree."
        )
    _check_shape(len(indptr) - 1, n_features)
    if n_features > 2**31 - 2:
        raise DataError(f"There are {n_features} features, but at most {2**31 - 2} are allowed; hash or drop some.")
    # int32 indices are not truncated below, and `survey` names the row of one that is too large
    if len(indices) and indices.dtype != np.int32:
        for index in (int(indices.max()), int(indices.min())):
            if not 0 <= index < n_features:
                raise DataError(f"A column index is {index}, but there are {n_features} features, counted from 0.")
    with np.errstate(over="ignore"):  # values too large become infinite, and `survey` names their row
        values = np.ascontiguousarray(data, dtype=np.float32)
    columns = np.ascontiguousarray(indices, dtype=np.int32)
    return Rows(values, columns, np.ascontiguousarray(indptr, dtype=np.int64), n_features)


def _check_shape(n_rows: int, n_features: int) -> None:
    if n_rows == 0:
        raise DataError(
            f"Found array with 0 sample(s) (shape=({n_rows}, {n_features})) while a minimum of 1 is required."
        )
    if n_features == 0:
        raise DataError(
            f"Found array with 0 feature(s) (shape=({n_rows}, {n_features})) while a minimum of 1 is required."
        )


def _from_dense(X: Any) -> Rows:
    try:
        array = np.asarray(X)
        with np.errstate(over="ignore"):
            array = array if np.iscomplexobj(array) else array.astype(np.float32)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else DataError
        raise kind(f"The examples must be numbers ({error}).") from None
    if np.iscomplexobj(array):
        raise DataError("Complex data not supported: the examples have complex values; give real numbers.")
    if array.ndim != 2:
        raise DataError(
            f"The examples must be rows x features, but the array has {array.ndim} dimension(s). Reshape your data "
            "with X.reshape(-1, 1) for one feature or X.reshape(1, -1) for one example."
        )
    _check_shape(*array.shape)
    rows, columns = np.nonzero(array)  # NaN is not zero
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(array)))])
    return Rows(array[rows, columns], columns.astype(np.int32), indptr, array.shape[1])


def survey(rows: Rows, threads: Threads) -> NDArray[np.int64]:
    """Check every value and index; return in how many rows each column occurs."""

    def part(thread: int) -> tuple[NDArray[np.int32], int, int]:
        begin, end = threads.share(thread, rows.n_rows)
        counts = np.zeros(rows.n_features, np.int32)
        row, fault = survey_rows(rows.indptr, rows.indices, rows.values, begin, end, rows.n_features, counts)
        return counts, row, fault

    parts = threads.run(part)
    for _, row, fault in parts:
        if fault == BAD_VALUE:
            raise DataError(
                f"Row {row} (from 0) holds NaN, infinity or a value too large for float32; clean the data first."
            )
        if fault == BAD_RANGE:
            raise DataError(
                f"Row {row} (from 0) has a column index outside 0..{rows.n_features - 1}; correct the indices."
            )
        if fault:
            raise DataError(
                f"Row {row} (from 0) has unsorted or duplicate column indices; each must be larger than the one before."
            )
    total: NDArray[np.int64] = np.sum([counts for counts, _, _ in parts], axis=0, dtype=np.int64)
    return total


def arrange(rows: Rows, counts: NDArray[np.int64], outputs: int, threads: Threads, *, apart: bool) -> Arranged:
    """Rename columns by falling frequency; where threads work `apart`, put the hot ones of each row first.

    Args:
        rows: The examples.
        counts: In how many rows each column occurs.
        outputs: Weights per column.
        threads: The threads.
        apart: Whether threads will keep copies of the hot columns.
    """
    most = int(counts.max())
    keys = (most - counts).astype(np.min_scalar_type(most))  # NumPy sorts up to 16 bits by radix
    place = np.empty(rows.n_features, np.int32)
    place[np.argsort(keys, kind="stable")] = np.arange(1, rows.n_features + 1)
    # hot columns are met at least about once between two merges, since a copy of a rarer one gains nothing; and they
    # are at most half of the columns, so that threads really share the other half
    frequent = int(np.count_nonzero(counts * 2 * CHUNK * ROUND >= rows.n_rows)) if apart else 0
    hot = 1 + min(frequent, rows.n_features // 2, HOT_FLOATS // outputs)
    split = np.zeros(rows.n_rows, np.int64)
    sizes = (np.diff(rows.indptr) + (PAD - 1)) // PAD * PAD
    parts = [threads.share(thread, rows.n_rows) for thread in range(threads.count)]
    if apart:
        is_hot = place < hot
        threads.run(lambda thread: measure_rows(rows.indptr, rows.indices, *parts[thread], is_hot, split, sizes))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    split += starts[:-1]
    total = int(starts[-1])
    kind = np.uint16 if rows.n_features < 2**16 else np.uint32  # 16 bits: a quarter less to read
    # one block: NumPy asks for huge pages from 4 MiB up, and thousands of small pages take as long as an epoch
    block = np.empty(total * (4 + kind().itemsize), np.uint8)
    values = block[: 4 * total].view(np.float32)
    indices: NDArray[np.unsignedinteger[Any]] = block[4 * total :].view(kind)
    source, names = (rows.indptr, rows.indices, rows.values), place.astype(kind)
    if apart:
        threads.run(lambda thread: arrange_rows(*source, *parts[thread], names, hot, starts, split, indices, values))
    else:
        threads.run(lambda thread: rename_rows(*source, *parts[thread], names, starts, indices, values))
    return Arranged(starts, split, indices, values, place, hot, int(sizes.max()))
