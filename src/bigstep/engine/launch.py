"""Starting several ranks on one machine: each gets the same job, and all are watched until they end.

Imports no torch, so the launcher costs next to nothing beside the ranks that it watches.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bigstep.engine.job import JOB_VARIABLE, Job
from bigstep.engine.scratch import scratch_folder
from bigstep.errors import RunError

__all__ = ["RankProcesses", "die_with_launcher", "launch", "program"]

_LAUNCHER_VARIABLE = "BIGSTEP_LAUNCHER"
_GRACE_S = 10.0
"""How long the other ranks may take to notice a failed one and to report what they saw."""
_ASKING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""What asks a run to save its state and stop; ranks, in process groups of their own, get a terminal's from us alone."""
_DEAF_S = 3.0
"""How long the others may take once that signal has killed a rank: it had no handler yet, so there is no state."""
_SAVING_S = 120.0
"""How long ranks that were asked to stop may take to save the run."""


def program(*arguments: str) -> list[str]:
    """Return the command line that runs `bigstep ARGUMENTS` with this very bigstep, wherever it was imported from.

    The current folder is not put on the path: a `random.py` that lies there must not be taken for Python's own.
    """
    source = str(Path(__file__).parents[2])
    start = "import sys; del sys.argv[0]; sys.path.append({!r}); from bigstep.__main__ import program; program()"
    return [sys.executable, "-P", "-c", start.format(source), "bigstep", *arguments]


def launch(procs: int, job: Job) -> int:
    """Run a job as `procs` ranks and return the exit status of the run.

    Rank 0 keeps this terminal; what the others print is shown only if they fail.
    """
    with started(procs, job) as ranks:
        ranks.watch()
        failed = ranks.first_failed()
        if failed is None:
            return 0
        if ranks.stop_number:
            return ranks.stopped()
        ranks.wait(_GRACE_S, ranks.processes[:1])  # rank 0 reports for all; others may hang and never end
        return ranks.explain(failed)


@dataclass
class RankProcesses:
    """The ranks of one run, each a process."""

    processes: list[subprocess.Popen[bytes]]
    scratch: Path
    stop_number: int = 0
    """The signal that asked this run to stop, if one did."""

    def watch(self, until: Callable[[], bool] = lambda: False) -> None:
        """Return when all ranks have ended, when one has failed, or when `until` returns True."""
        while any(process.poll() is None for process in self.processes):
            if self.first_failed() is not None or until():
                return
            time.sleep(0.05)  # polling children, not synchronising with them

    def first_failed(self) -> int | None:
        """Return a rank that failed: one that a signal killed, if there is one, else one that exited with an error."""
        statuses = {rank: process.poll() for rank, process in enumerate(self.processes)}
        failed = [rank for rank, status in statuses.items() if status]
        return min(failed, key=lambda rank: (statuses[rank] > 0, rank), default=None)  # type: ignore[operator]

    def killed(self) -> list[int]:
        """Return the ranks that a signal killed."""
        return [rank for rank, process in enumerate(self.processes) if (process.poll() or 0) < 0]

    def explain(self, first: int) -> int:
        """Return rank 0's status if it has reported a failure; else raise an error that names the rank that failed.

        A rank that a signal killed is always named.
        """
        failed = self.first_failed()
        first = first if failed is None else failed
        status, zero = self.processes[first].poll(), self.processes[0].poll()
        assert status is not None
        if status < 0:
            raise RunError(f"Rank {first} was killed by {signal.Signals(-status).name}; continue with --resume.")
        if zero:
            return zero
        log = self.scratch / f"rank-{first}.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        raise RunError(f"Rank {first} failed with status {status}: {lines[-1] if lines else 'it printed nothing'}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: ask every rank to save the run and stop."""
        self.stop_number = number
        self.send(signal.Signals(number))

    def stopped(self) -> int:
        """Wait until ranks that were asked to stop have saved the run, and return rank 0's status."""
        self.wait(_SAVING_S)
        status = self.processes[0].poll()
        if status is None or status < 0:  # asked before it had a handler, or never done with saving
            name = signal.Signals(self.stop_number).name
            error = RunError(f"Stopped by {name} before its state could be saved; continue with --resume.")
            error.exit_status = 128 + self.stop_number
            raise error
        return status

    def wait(
        self,
        seconds: float,
        processes: Sequence[subprocess.Popen[bytes]] | None = None,
        *,
        grace_s: float = _GRACE_S,
    ) -> None:
        """Wait for ranks to end, but not for ever: once a signal has killed one, the others may wait for it in vain.

        Args:
            seconds: How long at most.
            processes: For which of them; None for all.
            grace_s: How long at most once a signal has killed one.
        """
        deadline, awaited = time.monotonic() + seconds, self.processes if processes is None else processes
        lost = False
        while any(process.poll() is None for process in awaited) and time.monotonic() < deadline:
            if not lost and (killed := self.killed()):
                deaf = any(self.processes[rank].poll() == -self.stop_number for rank in killed)
                lost, deadline = True, min(deadline, time.monotonic() + (min(_DEAF_S, grace_s) if deaf else grace_s))
            time.sleep(0.02)  # polling children, not synchronising with them


@contextlib.contextmanager
def started(procs: int, job: Job) -> Iterator[RankProcesses]:
    """Start the ranks; on exit none is left running, whatever happened."""
    with scratch_folder() as scratch:
        job.write(scratch / "job.json")
        ranks = RankProcesses([], scratch)
        # a signal that is ignored stays so: SIGHUP under nohup
        heard = [number for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, ranks.stop) for number in heard}
        try:
            ranks.processes += (_start(rank, procs, scratch) for rank in range(procs))
            yield ranks
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            ranks.send(signal.SIGKILL)
            ranks.wait(_GRACE_S)


def _start(rank: int, procs: int, scratch: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | rank_environment(rank, procs, scratch)
    command = program(*sys.argv[1:])  # ranks read the job; the words are for people who list processes
    # a process group of its own: Ctrl-C reaches a rank once, from the launcher, and not from the terminal as well
    if rank == 0:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
    with open(scratch / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
        )


def rank_environment(rank: int, procs: int, scratch: Path) -> dict[str, str]:
    """Return the variables that this process, the launcher, sets for a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(procs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(procs),
        "BIGSTEP_STORE": str(scratch / "store"),
        JOB_VARIABLE: str(scratch / "job.json"),
        _LAUNCHER_VARIABLE: str(os.getpid()),
    }


def die_with_launcher(launcher: int | str | None = None) -> None:
    """Make the kernel end this process when its launcher dies, so that none is left writing into a resumed run.

    Args:
        launcher: Its process number; None takes it from the environment that `launch` sets, or does nothing.
    """
    launcher = launcher or os.environ.get(_LAUNCHER_VARIABLE)
    if launcher is None or sys.platform != "linux":
        return
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the request took effect
        os._exit(1)
