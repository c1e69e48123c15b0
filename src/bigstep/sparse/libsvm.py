"""Read LIBSVM files, plain or gzipped, a few megabytes at a time."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigstep.errors import DataError
from bigstep.sparse.kernels.libsvm_text import BAD_INDEX, BAD_LABEL, NOT_FINITE, NOT_SORTED, TRUNCATED, parse_lines
from bigstep.sparse.rows import Rows

__all__ = ["read_libsvm", "read_libsvm_files"]

_FAULTS = {
    BAD_LABEL: "the label is not an integer; write a whole number first",
    TRUNCATED: "the line is truncated: a feature must be index:value",
    BAD_INDEX: "a feature index is not a whole number below 2^31 followed by a colon; write index:value",
    NOT_FINITE: "a value is NaN, infinite or too large for float32; clean the data first",
    NOT_SORTED: "feature indices are unsorted or duplicate; each must be larger than the one before",
}

_BLOCK = 1 << 23  # bytes of text that are parsed at once
_MOST_PACKED = 32  # text of numbers shrinks 3 to 8 times; a small file that unpacks further could fill the memory
_FEW_COLUMNS = 1 << 22  # always allowed; more columns need a value per hundred, or `n_features`


Examples = tuple[Rows, NDArray[np.int64]]


def read_libsvm(path: str | Path, n_features: int | None = None) -> Examples:
    r"""Read `label index:value ...` lines; indices count from 1, or from 0 in a file that uses 0.

    A small file cannot take much memory: one that unpacks to more than 32 times its size is refused, and so is one with
    a largest index far above its number of values, unless `n_features` confirms it.

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
    return read_libsvm_files([path], n_features)[0]


def read_libsvm_files(paths: Sequence[str | Path], n_features: int | None = None) -> list[Examples]:
    """Read files that belong together, such as training and test examples: they have the same columns.

    If one uses index 0, all count from 0: a small file may happen not to use the first feature.
    """
    parsed = [_parse(Path(path)) for path in paths]
    first = min(smallest for *_, smallest in parsed)
    found = []
    for path, (labels, lengths, indices, values, _) in zip(paths, parsed, strict=True):
        indices -= first
        _check_width(f"{path!s:.200}", indices, n_features)
        found.append((values, indices, np.concatenate([[0], np.cumsum(lengths)]), labels))
    width = n_features or max(int(indices.max(initial=0)) + 1 for _, indices, _, _ in found)
    return [(Rows(values, indices, indptr, width), labels) for values, indices, indptr, labels in found]


def _check_width(shown: str, indices: NDArray[np.int32], n_features: int | None) -> None:
    width = int(indices.max(initial=0)) + 1
    if n_features is not None and width > n_features:
        raise DataError(f"{shown} has {width} features, but {n_features} are allowed; give a larger n_features.")
    if n_features is None and width > max(_FEW_COLUMNS, 100 * len(indices)):
        raise DataError(
            f"{shown} has an index of {width:,} but only {len(indices):,} values, and a weight would be kept for every "
            f"index below; renumber the features, or give n_features={width} if this is intended."
        )


def _parse(path: Path) -> tuple[Any, Any, Any, Any, int]:
    """Return labels, lengths of rows, indices as written, values, and 0 if some index is 0, else 1."""
    shown = f"{path!s:.200}"
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]] = []
    lines, smallest = 0, 1
    for text in _blocks(path):
        most_rows, most_values = text.count(b"\n") + 1, text.count(b":")
        targets, starts = np.empty(most_rows, np.float64), np.empty(most_rows + 1, np.int64)
        indices, values = np.empty(most_values, np.int32), np.empty(most_values, np.float32)
        fault, line, n_rows, count, least = parse_lines(np.frombuffer(text, np.uint8), targets, starts, indices, values)
        if fault:
            raise DataError(f"{shown}, line {lines + line}: {_FAULTS[fault]}.")
        lines, smallest = lines + line, min(smallest, least)
        if n_rows:
            lengths = np.diff(starts[: n_rows + 1])
            parts.append((targets[:n_rows].astype(np.int64), lengths, indices[:count], values[:count]))
    if not parts:
        raise DataError(f"{shown} holds no examples; give a LIBSVM file with one example per line.")
    labels, lengths, indices, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return labels, lengths, indices, values, smallest


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the text in pieces that end where a line ends."""
    shown = f"{path!s:.200}"
    try:
        if path.exists() and not path.is_file():  # reading a pipe might wait for ever
            raise DataError(f"{shown} is not a regular file; give the path of a LIBSVM file.")
        with open(path, "rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            left = path.stat().st_size * _MOST_PACKED + _BLOCK if packed else None
            file = gzip.GzipFile(fileobj=plain) if packed else plain
            unfinished: list[bytes] = []  # a line may be longer than a block
            while block := file.read(_BLOCK):
                if left is not None and (left := left - len(block)) < 0:
                    raise DataError(
                        f"{shown} unpacks to more than {_MOST_PACKED} times its size, as no real data does; unpack "
                        "it yourself if you trust it."
                    )
                end = block.rfind(b"\n") + 1
                if end:
                    yield b"".join([*unfinished, block[:end]])
                    unfinished = []
                unfinished.append(block[end:])
            yield b"".join(unfinished)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{shown} is a damaged or truncated gzip file; fetch it again.") from None
    except OSError as error:
        raise DataError(f"{shown} cannot be read ({error.strerror}); give the path of a LIBSVM file.") from None
