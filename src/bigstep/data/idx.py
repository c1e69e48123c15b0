"""IDX files: the format of MNIST and Fashion-MNIST, plain or compressed with gzip.

A file is two zero bytes, a type (8 for uint8), the number of dimensions, each dimension as a big-endian 32-bit number,
and the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from bigstep.data.sources.memory import TensorImages
from bigstep.errors import DataError

__all__ = ["find_idx", "open_idx", "read_idx"]

_MAX_BYTES = 2**31  # four times the largest set that is published in this format
_MAX_GZIP_RATIO = 64  # images compress to a quarter; a file compressed more tightly than this holds no images
_ALWAYS_READ = 2**24  # bytes unpacked up to which the ratio does not matter: labels may compress more tightly
_CHUNK_BYTES = 2**20
_PARTS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an IDX file of uint8 values; what its header claims is checked before memory is allocated.

    Args:
        path: the file; a name that ends in .gz is decompressed.
        dimensions: how many the file must have: 3 for images, 1 for labels.

    Returns:
        uint8 of the shape in the header.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "labels"
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([9, 0, 4]))
    ...     read_idx(path, dimensions=1)
    tensor([9, 0, 4], dtype=torch.uint8)
    """
    packed = path.suffix == ".gz"
    try:
        stored = path.stat().st_size
        with gzip.open(path) if packed else open(path, "rb") as file:
            most = max(stored * _MAX_GZIP_RATIO, _ALWAYS_READ) if packed else stored
            return _read(cast(BinaryIO, file), path, dimensions, most)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "its compressed data is damaged"
        raise DataError(f"{path} cannot be read: {reason}.") from None


def _read(file: BinaryIO, path: Path, dimensions: int, most: int) -> Tensor:
    head = file.read(4 + 4 * dimensions)
    if len(head) < 4 + 4 * dimensions or head[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{path} is not an IDX file of {dimensions}-dimensional bytes.")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    size = math.prod(shape)
    if size + len(head) > most or size > _MAX_BYTES:
        raise DataError(f"{path} claims {' x '.join(map(str, shape))} values, which a file of its size cannot hold.")
    values = bytearray()  # grows with what is there, not with what the header claims
    while len(values) < size and (chunk := file.read(min(size - len(values), _CHUNK_BYTES))):
        values += chunk
    if len(values) != size or file.read(1):
        found = f"only {len(values):,}" if len(values) != size else "more"
        raise DataError(f"{path} should hold {size:,} values by its header but holds {found}; fetch it again.")
    if size == 0:
        raise DataError(f"{path} holds no values.")
    return torch.from_numpy(np.frombuffer(values, dtype=np.uint8).reshape(shape))


def find_idx(folder: Path) -> dict[str, Path] | None:
    """Return the four files of a set, by name without .gz, or None if one is missing."""
    found = {}
    for name in (f"{split}-{part}" for split in ("train", "t10k") for part in _PARTS):
        for spelling in (name, f"{name}.gz", name.replace("-idx", ".idx"), name.replace("-idx", ".idx") + ".gz"):
            if (folder / spelling).is_file():
                found[name] = folder / spelling
                break
        else:
            return None
    return found


def open_idx(
    files: dict[str, Path], classes: tuple[str, ...], mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[TensorImages, TensorImages]:
    """Read the training and the test set from the files that `find_idx` found."""

    def split(name: str) -> TensorImages:
        images_path, labels_path = (files[f"{name}-{part}"] for part in _PARTS)
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if len(images) != len(labels):
            raise DataError(f"{labels_path} has {len(labels)} labels for the {len(images)} images of {images_path}.")
        return TensorImages(
            images=images.unsqueeze(1), labels=labels.long(), classes=classes, mean=mean, std=std, name=str(labels_path)
        )

    return split("train"), split("t10k")
