"""Packed images: tar files in the form of WebDataset (000042.jpg beside 000042.cls), and an index beside them.

Any reader of WebDataset reads the tar files. The index adds what they lack: where each image is, so that any sample can
be read without those before it; how large it is, so that crops can be drawn before it is opened; and a checksum. The
files are memory-mapped: all processes of a machine share one copy in the page cache.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bigstep.data.decode import MAX_PIXELS, open_image
from bigstep.data.decoders.base import Buffer
from bigstep.data.names import INDEX, Wanted
from bigstep.data.npy import map_npy
from bigstep.data.pair import DataPair
from bigstep.data.sources.base import digest
from bigstep.data.sources.coded import CodedImages
from bigstep.data.sources.folder import MEAN, STD
from bigstep.errors import DataError

__all__ = ["FORMAT", "RECORD", "PackedImages", "open_packed"]

FORMAT = "bigstep pack 1"
RECORD = np.dtype(
    [
        ("shard", "<u4"), ("size", "<u4"), ("offset", "<u8"), ("label", "<u4"), ("width", "<u4"), ("height", "<u4"),
        ("crc", "<u4"),
    ]
)  # fmt: skip
"""Where an image is (tar file, bytes, place of the first), its label, its size in pixels, and its CRC-32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedImages(CodedImages):
    """Labelled images in tar files.

    Args:
        root: the folder of the tar files.
        shards: names of the tar files.
        records: where each image is, of type `RECORD`.
        names: the name of each image before it was packed, as bytes.
        classes: names, by label.
        raw: whether images are stored as pixels instead of compressed.
        mean: of each channel, images scaled to 0..1.
        std: of each channel.
        sums: SHA-256 of the tar files and of the file of names, as the index has them.
    """

    root: Path
    shards: tuple[str, ...]
    records: NDArray[Any]
    names: NDArray[np.bytes_]
    classes: tuple[str, ...]
    raw: bool
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    sums: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.root)

    @cached_property
    def labels(self) -> Tensor:
        """The class of each image."""
        return torch.from_numpy(self.records["label"].astype(np.int64))

    @cached_property
    def sizes(self) -> Tensor:
        """Width and height of each image in pixels, (N, 2)."""
        return torch.from_numpy(np.stack([self.records["width"], self.records["height"]], 1).astype(np.int64))

    def size(self, index: int, content: Buffer | None = None) -> tuple[int, int]:
        """Return width and height as the index has them."""
        record = self.records[index]
        return int(record["width"]), int(record["height"])

    def where(self, index: int) -> str:
        """Return the tar file, and the name of the image before it was packed."""
        shard = self.shards[self.records[index]["shard"]]
        return f"{self.root / shard} ({os.fsdecode(self.names[index])})"

    def content(self, index: int) -> memoryview:
        """Return the stored bytes of an image, in the mapped file; their checksum is compared the first time."""
        record = self.records[index]
        begin, size = int(record["offset"]), int(record["size"])
        content: memoryview = self._mapped[record["shard"]][begin : begin + size].data
        if not self._checked[index]:  # comparing takes twice as long as all else that is done here if a GPU decodes
            if zlib.crc32(content) != record["crc"]:
                raise DataError(f"{self.where(index)} does not have its checksum; pack it again.")
            self._checked[index] = True
        return content

    @contextmanager
    def open(self, index: int, content: Buffer | None = None) -> Iterator[Image.Image]:
        """Open an image."""
        content = self.content(index) if content is None else content
        if self.raw:
            width, height = self.size(index)
            pixels = np.frombuffer(content[-3 * width * height :], dtype=np.uint8).reshape(height, width, 3)
            yield Image.fromarray(pixels)
            return
        with open_image(self.where(index), io.BytesIO(content)) as image:
            yield image

    @cached_property
    def _checked(self) -> NDArray[np.bool_]:
        """Which images this process has compared with their checksums."""
        return np.zeros(len(self), dtype=bool)

    @cached_property
    def _mapped(self) -> list[NDArray[np.uint8]]:
        """The tar files; mapping one takes no memory and reads nothing."""
        # as plain arrays: slicing a memmap takes longer than reading an image's header
        return [np.asarray(np.memmap(self.root / shard, dtype=np.uint8, mode="r")) for shard in self.shards]

    def subset(self, indices: Tensor) -> PackedImages:
        """Keep the samples at `indices`, in that order."""
        return replace(self, records=self.records[indices.numpy()], names=self.names[indices.numpy()])

    def fingerprint(self) -> str:
        """Hash the images' original names, labels, sizes and checksums."""
        return digest(len(self), self.names, self.records["label"].copy(), self.records["crc"].copy())

    def describe(self, verify: bool) -> dict[str, Any]:
        """Describe the images; also list other damage: to the headers in tar files, to names, to classes."""
        facts = super().describe(verify)
        corrupt = facts["corrupt"]
        for path in [self.root / file for file in self.sums] if verify else []:
            named = any(row["file"].startswith(f"{path} (") for row in corrupt)
            if not named and _sha256(path) != self.sums[path.name]:
                corrupt.append({"file": str(path), "reason": "it does not have its checksum; pack it again."})
        labels, firsts = np.unique(self.records["label"], return_index=True)
        for label, first in zip(labels.tolist(), firsts.tolist(), strict=True):
            name, known = os.fsdecode(self.names[first]), self.classes[label]
            if name.partition("/")[0] != known:
                reason = f"it has the class {known!r} for {name!r}; pack it again."
                corrupt.append({"file": str(self.root / INDEX), "reason": reason})
        return facts


def open_packed(wanted: Wanted) -> DataPair:
    """Open a folder that `bigstep data pack` wrote; what its index says is checked before anything is read."""
    if not wanted.path:
        raise DataError(f"{wanted.name} needs data.path, the folder that `bigstep data pack` wrote.")
    root = Path(wanted.path)
    try:
        head = json.loads((root / INDEX).read_bytes())
        classes, raw = tuple(map(str, head["classes"])), bool(head["raw"])
        if head["format"] != FORMAT:
            raise KeyError
        return DataPair(*(_open_split(root, head["splits"][split], classes, raw) for split in ("train", "val")))
    except DataError:  # it is a ValueError, too
        raise
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(
            f"{root / INDEX} is not an index that `bigstep data pack` wrote; pack the images again."
        ) from None


def _open_split(root: Path, head: dict[str, Any], classes: tuple[str, ...], raw: bool) -> PackedImages:
    # file names alone: whatever an index says, nothing outside its folder is opened
    shards = tuple(Path(shard["file"]).name for shard in head["shards"])
    for shard in head["shards"]:
        path = root / Path(shard["file"]).name
        if (found := path.stat().st_size) != shard["bytes"]:
            raise DataError(f"{path} has {found:,} bytes, but should have {shard['bytes']:,}; pack it again.")
    content = (root / Path(head["records"]).name).read_bytes()
    if hashlib.sha256(content).hexdigest() != head["sha256"]:
        raise DataError(f"{root / head['records']} does not have its checksum; pack the images again.")
    records = np.load(io.BytesIO(content), allow_pickle=False)
    names = map_npy(root / Path(head["names"]).name)
    room = np.array([shard["bytes"] for shard in head["shards"]], dtype=np.uint64)
    if (
        records.dtype != RECORD
        or records.ndim != 1
        or not len(records)
        or names.shape != records.shape
        or names.dtype.kind != "S"
    ):
        raise ValueError
    pixels = records["width"].astype(np.uint64) * records["height"]
    fits = (
        (records["shard"] < len(shards)).all()
        and (records["label"] < len(classes)).all()
        and (records["offset"] + records["size"] <= room[records["shard"]]).all()
        and ((pixels > 0) & (pixels <= MAX_PIXELS)).all()
        and (not raw or (records["size"] >= 3 * pixels).all())
    )
    if not fits:
        raise ValueError
    sums = {Path(shard["file"]).name: str(shard["sha256"]) for shard in head["shards"]}
    if "names_sha256" in head:
        sums[Path(head["names"]).name] = str(head["names_sha256"])
    return PackedImages(root=root, shards=shards, records=records, names=names, classes=classes, raw=raw, sums=sums)


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
