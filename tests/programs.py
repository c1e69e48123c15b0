"""`bigstep train` as a program of its own: started, watched through what it writes, struck, waited for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from warm import Program

Run = Program | subprocess.Popen[str]

# float64, so that paths on different numbers of ranks can be compared to 1e-10; 75 steps, a checkpoint every 4 or so
STEPS = 75
SETTINGS = [
    "model=mlp", "workers.count=6", "workers.local_batch=16", "epochs=0.6", "exchange.bucket_mb=0.1",
    "checkpoint.every=0.03", "precision=float64", "lr.base=0.02", "lr.scaling=none",
]  # fmt: skip


def arguments(folder: Path, *more: str) -> list[str]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    train = ["-m", "bigstep", "train", "--device", "cpu", "--json", "--no-report"]
    return [*train, "--out", str(folder), *settings, *more]


def start(folder: Path, *more: str, cwd: Path | None = None) -> Program:
    """Start a run whose ranks need not import torch."""
    return Program(arguments(folder, *more)[2:], cwd=cwd, env=environment())


def start_cold(folder: Path, *more: str, launcher: tuple[str, ...] = (), **options: object) -> subprocess.Popen[str]:
    """Start a run as people do; `launcher` stands between the interpreter and the program, as torchrun does."""
    command = [sys.executable, *launcher, *arguments(folder, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload, no-any-return]


def rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_rows(process: Run, folder: Path, count: int) -> None:
    """Return once a run has written so many rows; fail if it ends before."""
    deadline = time.monotonic() + 200
    while rows(folder) < count:
        assert process.poll() is None, f"it ended before {count} rows: {process.communicate()}"
        assert time.monotonic() < deadline, f"{rows(folder)} of {count} rows after 200 s"
        time.sleep(0.005)  # watching a file that another program writes


def rank_processes(launcher: int) -> dict[int, int]:
    """Process numbers by rank of the ranks that a launcher has running."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with contextlib.suppress(OSError):  # one ended while it was looked at
            name = Path(f"/proc/{child}/comm").read_text().strip()
            entries = [f"RANK={name[5:]}".encode()] if name.startswith("rank-") else []
            for entry in entries or Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    found[int(entry[5:])] = int(child)
    return found


def sentences(stderr: str) -> list[str]:
    """What the program itself said, without progress."""
    return [line for line in stderr.splitlines() if line.startswith("bigstep: ")]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}
