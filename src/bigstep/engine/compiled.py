"""Code compiled for a GPU, kept from run to run: a folder for each combination of versions and device.

Triton and torch's compiler key their files by source and shapes; none of them knows the version of everything below it,
and torch's own folder is under /tmp. So they are given one under the user's cache whose name is a digest of all that
compiled code depends on. It also holds how long the first step of a run took, to announce that to the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import bigstep
from bigstep.config import RunConfig
from bigstep.data.download import cache_folder
from bigstep.engine.meter import Flush
from bigstep.engine.methods.base import Note
from bigstep.engine.observers.base import Observer
from bigstep.errors import DataError
from bigstep.records import write_atomically

__all__ = ["Preparation", "facts_of", "keep_compiled", "prepares", "shape_of"]

KEPT = 4
"""Folders to keep, each some 10 to 100 MB: those that were not used for the longest time are removed."""
VARIABLES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables that name the compilers' folders, and their places in ours. CUDA's compiler keeps its own in the home."""


def facts_of(device: torch.device) -> dict[str, str]:
    """Return all that compiled code depends on besides itself and its shapes."""
    try:
        import triton

        with_triton = str(triton.__version__)
    except ImportError:
        with_triton = "none"
    properties = torch.cuda.get_device_properties(device)
    return {
        "bigstep": bigstep.__version__,
        "torch": torch.__version__,
        "triton": with_triton,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]  # untyped in torch
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
    }


def keep_compiled(facts: Mapping[str, str], home: Path | None = None) -> Path | None:
    """Let compilers keep their files in the folder of these facts, and return it; None if it cannot be made.

    A variable that the user has set stays as it is. Call this before anything is compiled.
    """
    name = hashlib.sha256(json.dumps(dict(sorted(facts.items()))).encode()).hexdigest()[:16]
    try:
        parent = (home or cache_folder()) / "compiled"
        folder = parent / name
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        write_atomically(folder / "facts.json", json.dumps(dict(facts), indent=1).encode())
    except (OSError, DataError):
        return None  # a read-only home, or none: every run compiles again
    for variable, place in VARIABLES.items():
        os.environ.setdefault(variable, str(folder / place))
    _remove_oldest(parent)
    return folder


def _remove_oldest(parent: Path) -> None:
    """Keep the most recently used folders; only folders of our own making are touched."""
    ours = [each for each in parent.iterdir() if re.fullmatch("[0-9a-f]{16}", each.name) and not each.is_symlink()]
    with contextlib.suppress(FileNotFoundError):  # another rank was quicker
        for old in sorted(ours, key=lambda each: each.stat().st_mtime, reverse=True)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)


def prepares(config: RunConfig) -> bool:
    """Whether a run on a GPU compiles or records something before its first step: all but plain torch does."""
    return config.kernels != "plain" or config.compile


def shape_of(config: RunConfig) -> str:
    """Return what decides the shapes of a run's kernels and graphs, in one line.

    >>> from bigstep.recipes import load
    >>> shape_of(load("sony"))
    'small, embedded 0 px, float32, lars, 32 x 32, 32 x 64'
    """
    counts = [config.workers.count, *(stage.count for stage in config.stages)]
    locals_ = [config.workers.local_batch, *(stage.local_batch for stage in config.stages)]
    sizes = ", ".join(f"{count} x {local}" for count, local in zip(counts, locals_, strict=True))
    where = f"{config.data.name} {config.data.image_size} px"
    compiled = ", compiled" if config.compile else ""
    return f"{config.model}, {where}, {config.precision}, {config.optimizer.name}, {sizes}{compiled}"


class Preparation(Observer):
    """Says that the first step takes longer, and how long it took here before; records how long it took now.

    Args:
        folder: That of the compiled code; None if nothing is kept.
        shape: Of the run.
    """

    def __init__(self, folder: Path | None, shape: str):
        self._file = folder / "first_steps.json" if folder else None
        self._shape, self._begun, self._done = shape, time.perf_counter(), False

    def announcement(self) -> str:
        """Return a remark on what happens until the first step is done."""
        took = self._known().get(self._shape)
        what = "Preparing the first step: kernels are compiled, algorithms chosen, graphs recorded"
        return f"{what}; that took {took:.0f} s here the last time." if took else f"{what}."

    def flushed(self, flush: Flush) -> Iterable[Note]:
        """Report how long the first step took, when its loss is known."""
        if self._done:
            return
        self._done = True
        seconds = time.perf_counter() - self._begun
        if self._file is not None:
            known = {**self._known(), self._shape: round(seconds, 2)}
            with contextlib.suppress(OSError):  # only a hint for the next run
                write_atomically(self._file, json.dumps(known, indent=1).encode())
        yield Note(f"The first step was ready after {seconds:.1f} s.", {"first_step_s": seconds})

    def _known(self) -> dict[str, float]:
        """Return seconds by shape; a file that is torn or not ours is ignored."""
        if self._file is None:
            return {}
        try:
            read: Any = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(read, dict):
            return {}
        return {str(key): float(value) for key, value in read.items() if isinstance(value, (int, float))}
