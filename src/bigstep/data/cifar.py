"""CIFAR-10 in its official forms: batches of pickled arrays, and batches of plain bytes.

A pickle can run code, and a few bytes of it can take gigabytes. The reader here builds bytes, numbers, lists, dicts and
byte arrays out of a bounded number of instructions, and refuses everything else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigstep.data.sources.memory import TensorImages, check_labels
from bigstep.errors import DataError

__all__ = ["CLASSES", "MEAN", "PYTHON_FILES", "STD", "find_cifar", "open_cifar"]

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
PYTHON_FILES = tuple(
    f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
)
_BINARY_FILES = tuple(f"{name.replace('-py', '-bin')}.bin" for name in PYTHON_FILES)
_PIXELS = 3 * 32 * 32
_MAX_FILE_BYTES = 2**27  # an official batch has 31 MB
_MAX_READS = 500_000  # an official batch takes about 100,000


def find_cifar(folder: Path) -> tuple[Path, ...] | None:
    """Return the six batch files, five to train on and the test batch last, or None if one is missing.

    Both `folder` itself and its official subfolder are searched; the binary form is taken if both forms are there.
    """
    for names in (_BINARY_FILES, PYTHON_FILES):
        for files in (tuple(folder / name for name in names), tuple(folder / Path(name).name for name in names)):
            if all(file.is_file() for file in files):
                return files
    return None


def open_cifar(files: tuple[Path, ...]) -> tuple[TensorImages, TensorImages]:
    """Read the training and the test set from the files that `find_cifar` found."""

    def split(parts: tuple[Path, ...]) -> TensorImages:
        images, labels = zip(*map(read_batch, parts), strict=True)
        return TensorImages(
            images=torch.cat(images), labels=torch.cat(labels), classes=CLASSES, mean=MEAN, std=STD, name=str(parts[0])
        )

    return split(files[:-1]), split(files[-1:])


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Read one batch file: images as uint8 of (N, 3, 32, 32) and labels as int64."""
    try:
        size = path.stat().st_size
        if not 0 < size <= _MAX_FILE_BYTES:
            raise DataError(f"{path} has {size:,} bytes; a batch of CIFAR-10 has 1 to {_MAX_FILE_BYTES:,}.")
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    pixels, labels = _parse_binary(content, path) if path.suffix == ".bin" else _parse_pickle(content, path)
    check_labels(labels, len(pixels), len(CLASSES), str(path))
    return pixels.view(-1, 3, 32, 32), labels


def _parse_binary(content: NDArray[np.uint8], path: Path) -> tuple[Tensor, Tensor]:
    record = 1 + _PIXELS
    if len(content) % record:
        raise DataError(f"{path} has {len(content):,} bytes, which is not a multiple of {record:,}; fetch it again.")
    records = torch.from_numpy(content).view(-1, record)
    return records[:, 1:], records[:, 0].long()


def _parse_pickle(content: NDArray[np.uint8], path: Path) -> tuple[Tensor, Tensor]:
    try:
        batch = _ArrayUnpickler(_BoundedReads(content.data), encoding="bytes").load()
        data, labels = batch[b"data"], batch[b"labels"]
    except Exception as error:  # a damaged pickle can raise nearly anything
        own = isinstance(error, pickle.UnpicklingError) and str(error).startswith("it ")  # not Python's own words
        reason = str(error) if own else f"damaged ({type(error).__name__})"
        raise DataError(f"{path} is not a batch of CIFAR-10: {reason}.") from None
    well_formed = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (_PIXELS,)
    if not well_formed or not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError(f"{path} is not a batch of CIFAR-10: it needs uint8 data N x {_PIXELS:,} and a list of labels.")
    return torch.from_numpy(np.ascontiguousarray(data)), torch.tensor(labels, dtype=torch.int64)


class _BoundedReads(io.BytesIO):
    """A file that allows a limited number of reads; each instruction of a pickle takes at least one."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > _MAX_READS:
            raise pickle.UnpicklingError(f"it has more than the {_MAX_READS:,} parts that are read")
        return super().read(size)


def _refuse(unpickler: object) -> None:
    raise pickle.UnpicklingError("it holds a bytearray, which no official batch does")


def _skip_frame(unpickler: Any) -> None:
    unpickler.read(8)  # its length: a hint to readers that read ahead


class _ArrayUnpickler(pickle._Unpickler):  # type: ignore[misc,name-defined]  # Python's own, not in the stubs
    """An unpickler that can build arrays of bytes and plain containers, and call nothing else.

    The unpickler written in C keeps its memo in an array as long as the largest memo index in the file, so that nine
    bytes can take gigabytes. This one, written in Python, keeps a dict.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,  # type: ignore[attr-defined]  # as above
        pickle.BYTEARRAY8[0]: _refuse,  # allocates the size that the file names before it reads
        pickle.FRAME[0]: _skip_frame,
    }

    def find_class(self, module: str, name: str, /) -> Any:
        # closures, made anew each time: nothing that a pickle does to what it gets can outlive the load
        def empty_array(kind: object, *_: object) -> NDArray[np.uint8]:
            return np.empty(0, dtype=np.uint8)  # the array's own state, which follows, brings shape and bytes

        def byte_type(code: object, *_: object) -> np.dtype[np.uint8]:
            if code not in ("u1", b"u1", "|u1", b"|u1"):
                raise pickle.UnpicklingError(f"it holds an array of {code!r:.80}, not of bytes")
            return np.dtype(np.uint8)

        def encoded(text: str, *_: object) -> bytes:  # how Python 3 writes bytes for old readers
            return text.encode("latin1")

        allowed: dict[tuple[str, str], Callable[..., Any] | str] = {
            ("numpy.core.multiarray", "_reconstruct"): empty_array,
            ("numpy._core.multiarray", "_reconstruct"): empty_array,
            ("numpy", "ndarray"): "ndarray",  # only ever handed to _reconstruct
            ("numpy", "dtype"): byte_type,
            ("_codecs", "encode"): encoded,
        }
        if (module, name) not in allowed:
            asked = f"{module}.{name}".encode("unicode_escape").decode()
            raise pickle.UnpicklingError(f"it asks for {asked:.80}, which data has no use for")
        return allowed[module, name]
