"""Read LIBSVM files, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bigstep.errors import DataError
from bigstep.sparse.kernels.libsvm_text import BAD_INDEX, BAD_LABEL, NOT_FINITE, NOT_SORTED, TRUNCATED, parse_lines
from bigstep.sparse.rows import Rows

__all__ = ["read_libsvm"]

_FAULTS = {
    BAD_LABEL: "the label is no integer; write a whole number first",
    TRUNCATED: "the line is truncated: a feature must be index:value",
    BAD_INDEX: "a feature index is not a whole number below 2^31 followed by a colon; write index:value",
    NOT_FINITE: "a value is NaN, infinite or too large for float32; clean the data first",
    NOT_SORTED: "feature indices are unsorted or duplicate; each must be larger than the one before",
}


def read_libsvm(path: str | Path, n_features: int | None = None) -> tuple[Rows, NDArray[np.int64]]:
    r"""Read `label index:value ...` lines; indices count from 1, or from 0 in a file that uses 0.

    Args:
        path: The file; gzipped when its content says so, whatever its name.
        n_features: Columns to give the rows; None takes the largest index.

    Returns:
        Rows and integer labels.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "two.svm"
        >>> _ = path.write_text("+1 1:0.5 3:2\n-1 2:1  # a comment\n")
        >>> rows, labels = read_libsvm(path)
        >>> labels.tolist(), rows.indices.tolist(), rows.n_features
        ([1, -1], [0, 2, 1], 3)
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path} is a damaged or truncated gzip file; fetch it again.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); give the path of a LIBSVM file.") from None
    text = np.frombuffer(content, np.uint8)
    most_rows = content.count(b"\n") + 1
    most_values = content.count(b":")
    labels = np.empty(most_rows, np.float64)
    indptr = np.empty(most_rows + 1, np.int64)
    indices = np.empty(most_values, np.int32)
    values = np.empty(most_values, np.float32)
    fault, line, n_rows, count, smallest = parse_lines(text, labels, indptr, indices, values)
    if fault:
        raise DataError(f"{path}, line {line}: {_FAULTS[fault]}.")
    if n_rows == 0:
        raise DataError(f"{path} holds no examples; give a LIBSVM file with one example a line.")
    indices = indices[:count]
    if smallest > 0:
        indices -= 1
    width = int(indices.max()) + 1 if count else 1
    if n_features is not None and width > n_features:
        raise DataError(f"{path} has {width} features, but {n_features} are allowed; give a larger n_features.")
    rows = Rows(values[:count], indices, indptr[: n_rows + 1].copy(), n_features or width)
    return rows, labels[:n_rows].astype(np.int64)
