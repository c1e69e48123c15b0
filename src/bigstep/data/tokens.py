"""A packed file of tokens: a text that has been divided into tokens, read from disk as it is needed.

The file is one line of JSON, padded with spaces to a multiple of 4,096 bytes, then the tokens of the training text and
of the test text as little-endian unsigned integers. A plain .npy file of one dimension is read as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigstep.data.npy import map_npy
from bigstep.data.vocabulary import Tokens, Vocabulary
from bigstep.errors import DataError
from bigstep.records import replacing

__all__ = ["Packed", "read_tokens", "write_tokens"]

_MAGIC = "bigstep tokens 1"
_BLOCK = 4096
_MAX_HEADER = 2**24  # a vocabulary of a million words
_TYPES = ("uint8", "uint16", "uint32")


@dataclass(frozen=True)
class Packed:
    """The contents of a packed file."""

    train: NDArray[Any]
    test: NDArray[Any]
    vocabulary: str
    """The name of the vocabulary; empty where the file does not say."""
    size: int
    """Different tokens of the vocabulary; 0 where the file does not say."""
    built: list[Any] | None
    train_bytes: int
    test_bytes: int


def write_tokens(
    path: Path, train: Tokens, test: Tokens, vocabulary: Vocabulary, train_bytes: int, test_bytes: int
) -> None:
    """Pack two texts into a file, which appears only once it is complete.

    Args:
        path: the file, which should end in .tokens.
        train: tokens of the training text.
        test: tokens of the test text.
        vocabulary: what the numbers mean.
        train_bytes: bytes of the training text.
        test_bytes: bytes of the test text.
    """
    header = {
        "format": _MAGIC,
        "dtype": vocabulary.dtype.name,
        "train": len(train),
        "test": len(test),
        "vocabulary": vocabulary.name,
        "size": vocabulary.size,
        "built": vocabulary.built(),
        "train_bytes": train_bytes,
        "test_bytes": test_bytes,
    }
    line = json.dumps(header).encode()
    filled = line.ljust(-(-(len(line) + 1) // _BLOCK) * _BLOCK - 1) + b"\n"
    try:
        with replacing(path) as file:
            file.write(filled)
            for tokens in (train, test):
                file.write(np.ascontiguousarray(tokens, dtype=vocabulary.dtype.newbyteorder("<")).data)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}.") from None


def read_tokens(path: Path) -> Packed:
    """Open a packed file; its tokens stay on disk until they are used."""
    try:
        return _read_npy(path) if path.suffix == ".npy" else _read_packed(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def _read_packed(path: Path) -> Packed:
    with open(path, "rb") as file:
        line = file.readline(_MAX_HEADER)
    try:
        header = json.loads(line)
        dtype, train, test = header["dtype"], header["train"], header["test"]
        facts = (header["vocabulary"], header["size"], header["built"], header["train_bytes"], header["test_bytes"])
        whole = all(type(value) is int and value >= 0 for value in (train, test, facts[1], *facts[3:]))
        told = type(facts[0]) is str and (facts[2] is None or type(facts[2]) is list)
        if header["format"] != _MAGIC or dtype not in _TYPES or not whole or not told:
            raise KeyError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{path} is not a packed file of tokens: its first line does not say what it holds.") from None
    size, expected = path.stat().st_size, len(line) + (train + test) * np.dtype(dtype).itemsize
    if size != expected:
        raise DataError(f"{path} has {size:,} bytes, but its first line announces {expected:,}; pack it again.")
    if train < 2 or test < 2:
        raise DataError(f"{path} has {train} tokens to train on and {test} to evaluate on; it needs two of each.")
    tokens = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r", offset=len(line))
    return Packed(tokens[:train], tokens[train:], *facts)


def _read_npy(path: Path) -> Packed:
    tokens = map_npy(path)
    if tokens.ndim != 1 or tokens.dtype.name not in _TYPES or len(tokens) < 20:
        raise DataError(
            f"{path} must hold tokens as {', '.join(_TYPES)} of one dimension, twenty at least, "
            f"not {tokens.dtype} of {tokens.shape}."
        )
    cut = len(tokens) - len(tokens) // 10
    return Packed(tokens[:cut], tokens[cut:], "", 0, None, 0, 0)
