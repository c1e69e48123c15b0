"""Checkpoints: everything that decides the path of a run, in one file that is either whole or refused.

A file is a magic number, the SHA-256 of what follows, and a `torch.save` archive of tensors and plain values. It is
written to a temporary name, synced and renamed, and read with `weights_only=True`, so a checkpoint never runs code.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.errors import DataError
from bigstep.records import write_atomically

__all__ = ["load_checkpoint", "load_latest", "save_checkpoint", "tensors_of", "weights_hash"]

_MAGIC = b"bigstep1"
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_SHARED = 4
"""How many tensors may share the same bytes, on average; tied weights do."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name, without what else a module may add (`get_extra_state`)."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def weights_hash(model: nn.Module) -> str:
    """Return the SHA-256 over all parameters and buffers, by name; equal weights give equal hashes on any rank.

    Batch norm's counters of forwards are left out: nothing reads them, and ranks that host more workers count more.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors_of(model).items()):
        if name.endswith("num_batches_tracked"):
            continue
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int, *, sync: bool = True) -> Path:
    """Write a checkpoint and remove all but the newest `keep` up to it.

    Args:
        folder: Where it goes.
        step: Its place in the run.
        state: What it holds.
        keep: How many stay.
        sync: Wait for the disk, so that it survives a crash of the machine and not only of the process.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:09d}.ckpt"
    write_atomically(path, b"".join([_MAGIC, hashlib.sha256(payload).digest(), payload]), sync=sync)
    # those of later steps do not count: the run could not read them, or it would have continued from them
    for old in [each for each in _newest_first(folder) if each.name <= path.name][keep:]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read one checkpoint, or say in one sentence what is wrong with it."""
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would wait for a writer
            raise DataError(f"The checkpoint {path} is not a file.")
        with open(path, "rb") as file:
            head = file.read(_HEADER_BYTES)
            if head[: len(_MAGIC)] != _MAGIC:
                raise DataError(f"{path} is not a checkpoint of bigstep.")
            if hashlib.file_digest(file, "sha256").digest() != head[len(_MAGIC) :]:  # before any memory is taken
                raise DataError(f"The checkpoint {path} is torn or corrupt: its checksum does not match.")
            file.seek(_HEADER_BYTES)
            payload = io.BytesIO(file.read())
    except OSError as error:
        raise DataError(f"The checkpoint {path} cannot be read ({error.strerror}).") from None
    try:
        _require_honest_sizes(payload)
        state = torch.load(payload, map_location="cpu", weights_only=True)
        _require_honest_tensors(state, payload.getbuffer().nbytes)
    except Exception as error:  # a file with a valid checksum may hold nonsense, which can raise nearly anything
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"The checkpoint {path} holds more than tensors and plain values: {problem}") from None
    if not isinstance(state, dict):
        raise DataError(f"{path} holds a {type(state).__name__} instead of the state of a run.")
    return state


def _require_honest_sizes(payload: io.BytesIO) -> None:
    """Refuse an archive that would unpack to more bytes than it has, before torch allocates memory for it."""
    with zipfile.ZipFile(payload) as archive:
        members = archive.infolist()
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if not stored or sum(member.file_size for member in members) > payload.getbuffer().nbytes:
        raise ValueError("its parts claim to be larger than the file")
    payload.seek(0)


def _require_honest_tensors(state: Any, file_bytes: int) -> None:
    """Refuse tensors that repeat a few bytes many times (by a stride of 0, say): a copy would take all that memory."""
    tensors = list(_tensors_of(state))
    if any(tensor.nbytes > tensor.untyped_storage().nbytes() for tensor in tensors):
        raise ValueError("a tensor claims to be larger than its bytes")
    if sum(tensor.nbytes for tensor in tensors) > _SHARED * file_bytes:
        raise ValueError("its tensors claim to be larger than the file")


def _tensors_of(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _tensors_of(each)


def load_latest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the newest checkpoint that is whole (or None), and a sentence about each newer one that is not."""
    problems: list[str] = []
    for path in _newest_first(folder):
        try:
            return load_checkpoint(path), problems
        except DataError as error:
            problems.append(str(error))
    return None, problems


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.ckpt"), reverse=True) if folder.is_dir() else []
