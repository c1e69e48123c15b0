"""Starting several ranks on one machine: the same command again, once a rank, watched until it ends.

Imports no torch, so the watcher costs nothing beside the ranks it watches.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bigstep.errors import RunError

__all__ = ["die_with_launcher", "is_rank", "launch"]

_LAUNCHER_VARIABLE = "BIGSTEP_LAUNCHER"
_GRACE_S = 10.0
"""How long the other ranks may take to notice a failed one and to say what they saw."""


def is_rank() -> bool:
    """Whether torchrun, or `launch`, started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(procs: int, arguments: Sequence[str]) -> int:
    """Run `bigstep ARGUMENTS` as `procs` ranks and return the exit status of the run.

    Rank 0 keeps this terminal; what the others print is shown only if they fail.
    """
    with tempfile.TemporaryDirectory(prefix="bigstep-") as scratch:
        ranks = [_start(rank, procs, arguments, Path(scratch)) for rank in range(procs)]
        previous = signal.signal(signal.SIGTERM, lambda *_: _signal_all(ranks, signal.SIGTERM))
        try:
            return _watch(ranks, Path(scratch))
        except KeyboardInterrupt:  # the terminal sent it to the ranks as well: let them finish their sentence
            _wait(ranks, _GRACE_S)
            return 130
        finally:
            signal.signal(signal.SIGTERM, previous)
            _signal_all(ranks, signal.SIGKILL)
            _wait(ranks, _GRACE_S)


def _start(rank: int, procs: int, arguments: Sequence[str], scratch: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(procs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(procs),
        "BIGSTEP_STORE": str(scratch / "store"),
        _LAUNCHER_VARIABLE: str(os.getpid()),
    }
    command = [sys.executable, "-m", "bigstep", *arguments]
    if rank == 0:
        return subprocess.Popen(command, env=environment)
    with open(scratch / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _watch(ranks: list[subprocess.Popen[bytes]], scratch: Path) -> int:
    """Wait until all ranks end; when one fails, give the others a moment and name it."""
    while True:
        statuses = [rank.poll() for rank in ranks]
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed:
            _wait(ranks, _GRACE_S)
            return _explain(failed[0], [rank.poll() for rank in ranks], scratch)
        if all(status == 0 for status in statuses):
            return 0
        time.sleep(0.05)  # polling children, not synchronising with them


def _explain(first: int, statuses: list[int | None], scratch: Path) -> int:
    """Say which rank failed and how; rank 0 has spoken for itself unless it was killed or never noticed."""
    status = statuses[first]
    assert status is not None
    zero = statuses[0]
    if zero is not None and zero > 0:
        if status < 0:
            raise RunError(f"Rank {first} was killed by {signal.Signals(-status).name}; the run can be resumed.")
        return zero
    if status < 0:
        raise RunError(f"Rank {first} was killed by {signal.Signals(-status).name}; the run can be resumed.")
    log = scratch / f"rank-{first}.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    raise RunError(f"Rank {first} failed with status {status}: {lines[-1] if lines else 'it said nothing'}")


def _signal_all(ranks: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _wait(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def die_with_launcher(launcher: int | str | None = None) -> None:
    """Make the kernel end this process when its launcher dies, so that none is left writing into a resumed run.

    Args:
        launcher: Its process number; None asks the environment that `launch` sets, and does nothing without it.
    """
    launcher = launcher or os.environ.get(_LAUNCHER_VARIABLE)
    if launcher is None or sys.platform != "linux":
        return
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the request took hold
        os._exit(1)
