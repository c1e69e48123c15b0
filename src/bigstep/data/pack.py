"""`bigstep data pack` of images: a folder of many files into a few large ones.

Images keep every byte unless a side is given: then those with a longer short side are shrunk to it. Raw stores pixels,
which take six times the space and no decoding. Each image is decoded once, so that a damaged one is named now and not
in the middle of a run. A tar file appears only once it is complete; an interrupted packing continues after the last
one. Only one process at a time packs into a folder.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import tarfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from PIL import Image

from bigstep.data.decode import cut, open_image
from bigstep.data.names import INDEX, PLAN, Packing, Wanted
from bigstep.data.sources.base import digest
from bigstep.data.sources.folder import FolderImages, open_folder
from bigstep.data.sources.packed import FORMAT, RECORD
from bigstep.errors import ConfigError, DataError, require
from bigstep.records import replacing, write_atomically

__all__ = ["pack_folder"]

LOCK = ".pack.lock"
_SHARD_BYTES = 2**28
_GROUP = 64  # images that are in work at once, which bounds the memory
_QUALITY = 92  # of images that are compressed again
_STATED_AT_ONCE = 8  # threads that ask for file sizes: they wait for a file server and do not compute
_SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp"}
"""By Pillow's name of the format; MPO is a JPEG followed by further pictures, as some cameras write it."""
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class _Packed:
    """An image as it is stored."""

    content: bytes
    suffix: str
    width: int
    height: int


@dataclass(frozen=True)
class _Shard:
    """A complete tar file."""

    file: str
    bytes: int
    sha256: str
    records: np.ndarray[Any, Any]


def pack_folder(wanted: Wanted, packing: Packing) -> dict[str, Any]:
    """Pack a folder of images; return what was packed, as `--json` prints it.

    Args:
        wanted: the folder.
        packing: where to and how.
    """
    if packing.raw and not packing.side:
        raise ConfigError("--raw stores pixels, so it needs --side, the longest short side of an image, such as 400.")
    train, val = open_folder(Path(wanted.path))
    out, began = packing.out, time.perf_counter()
    for source in (train, val):
        if out.resolve().is_relative_to(source.root.resolve()):
            raise ConfigError(f"{out} lies in {source.root}, where every folder is a class; name one elsewhere.")
    plan = {
        "format": FORMAT, "side": packing.side, "raw": packing.raw, "train": _fingerprint(train),
        "val": _fingerprint(val),
    }  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}; name another folder.") from None
    try:
        _refuse_foreign(out, plan)  # before a lock is put into it
        with _alone(out):
            _begin(out, plan)
            splits = {}
            for split, source in (("train", train), ("val", val)):
                shards = list(_shards(source, split, packing))
                splits[split] = _write_index(out, split, source, shards)
            index = {**plan, "classes": list(train.classes), "splits": splits}
            write_atomically(out / INDEX, json.dumps(index, indent=1).encode())
            for leftover in (out / PLAN, *out.glob("*-??????.json")):
                leftover.unlink(missing_ok=True)
    except DataError as error:  # in an image; repaired images are packed from the start, so all should be found at once
        raise DataError(
            f"{str(error).removesuffix('.')}; `bigstep data {wanted.path} --verify` names all damaged images."
        ) from None
    except OSError as error:
        raise DataError(
            f"{out} cannot be written: {error.strerror}; what is packed so far stays, and the same command continues."
        ) from None
    stored = sum(shard["bytes"] for split in splits.values() for shard in split["shards"])
    return {
        "path": str(out),
        "images": len(train) + len(val),
        "bytes": stored,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _fingerprint(source: FolderImages) -> str:
    """Hash names, labels and sizes of all files, so that a pack is not continued with images that have changed."""

    def sizes(indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.array([os.stat(source.path(index)).st_size for index in indices.tolist()], dtype=np.int64)

    parts = np.array_split(np.arange(len(source)), _STATED_AT_ONCE)
    try:
        with ThreadPoolExecutor(len(parts)) as pool:
            return digest(len(source), source.files, source.labels, np.concatenate(list(pool.map(sizes, parts))))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Lock a folder for this process; the system releases the lock when the process ends, however it ends."""
    from filelock import FileLock, Timeout  # as for run folders

    lock = FileLock(out / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"Another process is packing into {out}; wait until it ends, or name a new folder.") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # file systems without locks
            raise
    try:
        yield
    finally:
        (out / LOCK).unlink(missing_ok=True)
        lock.release()


def _refuse_foreign(out: Path, plan: dict[str, Any]) -> None:
    """Refuse a folder that holds anything but this pack."""
    require(
        _is_empty(out) or any(_holds(out / name, plan) for name in (INDEX, PLAN)),
        f"{out} is not empty, and holds no pack of the same images and options; name a new folder, or remove this one "
        "if the images have changed since.",
    )


def _is_empty(out: Path) -> bool:
    """Whether nothing is packed in a folder yet, although a packer may have begun."""
    nothing = {LOCK, *(path.name for path in out.glob(f".{PLAN}.*.part"))}
    there = {path.name for path in out.iterdir()}
    # a damaged image ended packing before any file was complete; it may have been repaired since
    return there <= nothing or (there <= {*nothing, PLAN} and _is_plan(out / PLAN))


def _begin(out: Path, plan: dict[str, Any]) -> None:
    """Write down what is packed, unless this continues a pack; remove the partial files of one that was killed."""
    _refuse_foreign(out, plan)  # it may have been packed into before the lock was taken
    if _is_empty(out):
        write_atomically(out / PLAN, json.dumps(plan).encode())
    for torn in out.glob(".*.part"):  # it may be what filled the disk
        torn.unlink(missing_ok=True)


def _is_plan(path: Path) -> bool:
    """Whether a file was written by a packer, and is not a foreign file of that name."""
    try:
        return set(json.loads(path.read_bytes()).keys()) == {"format", "side", "raw", "train", "val"}
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _holds(path: Path, plan: dict[str, Any]) -> bool:
    try:
        found = json.loads(path.read_bytes())
        return {key: found.get(key) for key in plan} == plan
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _shards(source: FolderImages, split: str, packing: Packing) -> Iterator[_Shard]:
    """Yield the tar files of a split: those that are there, then those that are missing."""
    begin, number, packed, began = 0, 0, 0, time.perf_counter()
    with ThreadPoolExecutor() as pool:  # decoding releases the interpreter's lock
        while begin < len(source):
            path = packing.out / f"{split}-{number:06d}.tar"
            shard = _finished(path)
            if shard is None:
                shard = _write_shard(path, source, begin, packing, pool)
                packed += len(shard.records)  # by this process, without what an earlier one has packed
                rate = packed / (time.perf_counter() - began)
                packing.say(f"{path.name}: {begin + len(shard.records):,} of {len(source):,} images, {rate:,.0f}/s")
            begin, number = begin + len(shard.records), number + 1
            yield shard


def _finished(path: Path) -> _Shard | None:
    """Return a tar file that an earlier attempt has completed."""
    try:
        kept = json.loads(path.with_suffix(".json").read_bytes())
        records = np.array([tuple(record) for record in kept["records"]], dtype=RECORD)
        shard = _Shard(path.name, kept["bytes"], kept["sha256"], records)
        return shard if path.stat().st_size == shard.bytes and kept["check"] == _check(shard) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _check(shard: _Shard) -> int:
    """Return a checksum of a tar file's records and hash."""
    return zlib.crc32(shard.records.tobytes() + shard.sha256.encode())


def _write_shard(path: Path, source: FolderImages, begin: int, packing: Packing, pool: ThreadPoolExecutor) -> _Shard:
    """Write one tar file, from the image `begin` on until it is full."""
    number = int(path.stem.rpartition("-")[2])
    records = []
    with replacing(path) as file:
        hashed = _Hashed(file)
        with tarfile.open(fileobj=cast(IO[bytes], hashed), mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for index, image in _encoded(source, begin, packing, pool):
                label = int(source.labels[index])
                offset = tar.offset + _BLOCK
                _add(tar, f"{index:08d}.{image.suffix}", image.content)
                _add(tar, f"{index:08d}.cls", str(label).encode())
                crc = zlib.crc32(image.content)
                records.append((number, len(image.content), offset, label, image.width, image.height, crc))
                if len(records) % _GROUP == 0:
                    packing.on_the_way(f"{path.name}: {begin + len(records):,} of {len(source):,} images")
                if tar.offset >= _SHARD_BYTES:
                    break
    shard = _Shard(path.name, hashed.tell(), hashed.digest.hexdigest(), np.array(records, dtype=RECORD))
    kept = {"bytes": shard.bytes, "sha256": shard.sha256, "records": records, "check": _check(shard)}
    write_atomically(path.with_suffix(".json"), json.dumps(kept).encode())
    return shard


def _encoded(
    source: FolderImages, begin: int, packing: Packing, pool: ThreadPoolExecutor
) -> Iterator[tuple[int, _Packed]]:
    for first in range(begin, len(source), _GROUP):
        group = range(first, min(first + _GROUP, len(source)))
        images = pool.map(lambda index: _encode(source.path(index), packing.side, packing.raw), group)
        yield from zip(group, images, strict=True)


def _encode(path: Path, side: int, raw: bool) -> _Packed:
    """Read an image and return it in the form to store; every pixel is decoded, so that damage shows."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    with open_image(path, io.BytesIO(content)) as image:
        width, height = image.size
        kind = image.format or ""
        scale = side / min(width, height) if side else 1.0
        if scale >= 1 and not raw:
            image.load()
            return _Packed(content, _SUFFIXES[kind], width, height)
        shape = (max(round(width * min(scale, 1)), 1), max(round(height * min(scale, 1)), 1))
        pixels = cut(image, (0, 0, width, height), shape)
    stored = io.BytesIO()
    if raw:
        np.save(stored, pixels)
    else:
        Image.fromarray(pixels).save(stored, "JPEG", quality=_QUALITY)
    return _Packed(stored.getvalue(), "npy" if raw else "jpg", *shape)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # no time, no owner: the same images give the same bytes
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _write_index(out: Path, split: str, source: FolderImages, shards: list[_Shard]) -> dict[str, Any]:
    """Write where every image of a split is stored; return the split's entry in the index."""
    files = {}
    for kind, values in (("records", np.concatenate([shard.records for shard in shards])), ("names", source.files)):
        content = io.BytesIO()
        np.save(content, values)
        files[kind] = content.getvalue()
        write_atomically(out / f"{split}-{kind}.npy", files[kind])
    return {
        "records": f"{split}-records.npy",
        "names": f"{split}-names.npy",
        "sha256": hashlib.sha256(files["records"]).hexdigest(),
        "names_sha256": hashlib.sha256(files["names"]).hexdigest(),
        "shards": [{"file": shard.file, "bytes": shard.bytes, "sha256": shard.sha256} for shard in shards],
    }


class _Hashed:
    """A file that is hashed as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._written, self.digest = file, 0, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        self._written += len(content)
        return self._file.write(content)

    def tell(self) -> int:
        return self._written
