"""Fetch a published file: to a temporary name, its checksum compared, then renamed.

Ranks of one machine share the cache folder, so a lock lets one of them download while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigstep.data.names import Progress
from bigstep.errors import DataError
from bigstep.records import replacing, write_atomically

__all__ = ["Remote", "cache_folder", "download", "locked", "unpack"]

_TIMEOUT_S = 30
_CHUNK_BYTES = 2**20
_MAX_BYTES = 2**31
_MAX_MEMBER_BYTES = 2**28


@dataclass(frozen=True)
class Remote:
    """A file at its official address."""

    url: str
    checksum: str
    """sha256:... of the file, or sha256-unpacked:... of what a gzip file unpacks to, as it may be compressed anew."""

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rpartition("/")[2]


def cache_folder() -> Path:
    """Return the folder for downloaded sets: $BIGSTEP_DATA, else ~/.cache/bigstep."""
    if given := os.environ.get("BIGSTEP_DATA"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "bigstep"
    except RuntimeError:  # a container may run as a user without an entry in its user database
        raise DataError("This user has no home folder to keep data sets in; set BIGSTEP_DATA to a folder.") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock; the lock ends with the process, however it ends.

    The lock is never opened through a link, which somebody else may have put there, and nothing is written to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DataError(
            f"The cache folder {folder} cannot be written ({error.strerror}); set BIGSTEP_DATA to one that can."
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"The cache folder {folder} cannot be locked ({error.strerror}); set BIGSTEP_DATA to a local folder."
            ) from None
        yield
    finally:
        os.close(lock)


def download(remote: Remote, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch a file into a folder and return its path; if that fails, the error says what to put where.

    Args:
        remote: what to fetch.
        folder: where to keep it.
        progress: called as the bytes arrive.
    """
    target = folder / remote.name
    checksum = _Checksum(remote.checksum)
    received = 0
    try:
        with urllib.request.urlopen(remote.url, timeout=_TIMEOUT_S) as response, replacing(target) as file:
            total = int(response.headers.get("Content-Length") or 0)
            while received <= _MAX_BYTES and (chunk := response.read(_CHUNK_BYTES)):
                file.write(chunk)
                checksum.update(chunk)
                received += len(chunk)
                if progress is not None:
                    progress(remote.name, received, total)
            if not checksum.matches():
                raise DataError(
                    f"What {remote.url} sent ({received:,} bytes) does not have the checksum {remote.checksum}; "
                    f"try again, or put the right file at {target}."
                )
    except OSError as error:  # URLError and timeouts are among them
        reason = getattr(error, "reason", None) or error.strerror or error
        raise DataError(
            f"{target} is missing and {remote.url} cannot be fetched ({reason}); "
            "fetch it with another machine and put it there."
        ) from None
    return target


class _Checksum:
    """The checksum of bytes that arrive piece by piece."""

    def __init__(self, expected: str) -> None:
        algorithm, _, self._digest = expected.partition(":")
        assert algorithm in ("sha256", "sha256-unpacked"), algorithm
        self._hash = hashlib.sha256()
        self._unpacker = zlib.decompressobj(wbits=31) if algorithm == "sha256-unpacked" else None  # 31: gzip
        self._damaged = False

    def update(self, piece: bytes) -> None:
        """Take the next piece."""
        if self._unpacker is None:
            self._hash.update(piece)
            return
        while piece and not self._damaged:
            try:
                self._hash.update(self._unpacker.decompress(piece, _CHUNK_BYTES))  # bounded, however much it unpacks to
            except zlib.error:
                self._damaged = True
            piece = self._unpacker.unconsumed_tail

    def matches(self) -> bool:
        """Whether the bytes are complete and as expected."""
        torn = self._damaged or (self._unpacker is not None and not self._unpacker.eof)
        return not torn and self._hash.hexdigest() == self._digest


def unpack(archive: Path, members: tuple[str, ...], folder: Path) -> None:
    """Write the named regular files of a tar archive into a folder; nothing else in the archive is touched."""
    wanted = set(members)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.name not in wanted or not member.isfile():
                    continue
                if member.size > _MAX_MEMBER_BYTES:
                    raise DataError(
                        f"{archive} holds a {member.name} of {member.size:,} bytes; fetch the archive again."
                    )
                content = tar.extractfile(member)
                assert content is not None, "regular files have content"
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, content.read())
                wanted.discard(member.name)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is damaged ({error}); remove it and fetch it again.") from None
    except OSError as error:
        reason = error.strerror or "its compressed data is damaged"
        raise DataError(f"{archive} cannot be unpacked into {folder}: {reason}.") from None
    if wanted:
        raise DataError(f"{archive} holds no {min(wanted)}; fetch the archive again.")
