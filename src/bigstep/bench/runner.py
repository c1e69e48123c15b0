"""Runs a list of planned runs one after another, each in its own process, and continues a list that was interrupted.

One at a time, since concurrent runs would distort each other's times; one thread per process (unless OMP_NUM_THREADS is
set), so that the speed-up of two ranks over one comes from ranks and not from threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigstep.bench.folders import State, failure_of, mark, prepare, state_of
from bigstep.bench.planned import Planned
from bigstep.bench.watch import Watch
from bigstep.engine.launch import program
from bigstep.errors import BigstepError, ConfigError, RunError
from bigstep.lab import train_on_host
from bigstep.lab.hosts import Lab, why_no_lab
from bigstep.records import locked

__all__ = ["Finished", "SuiteStoppedError", "run_all"]

_SAVING_S = 120.0
"""How long a run that was asked to stop may take to save itself."""
_LAB_S = 3_600.0


class SuiteStoppedError(RunError):
    """A suite that was asked to stop; the run under way was saved."""

    exit_status = 130


@dataclass(frozen=True)
class Finished:
    """What became of one planned run."""

    run: Planned
    folder: Path
    skipped: bool
    """Whether it had already finished or failed before this call."""
    failure: str | None


def run_all(
    runs: Sequence[Planned], suite: str, root: Path, watch: Watch, *, device: str = "auto", retry: bool = False
) -> list[Finished]:
    """Run what is not finished yet; a run that fails is recorded as failed, and the others follow.

    Args:
        runs: In the order in which to run them.
        suite: The name for records.
        root: The folder that holds a folder for each run.
        watch: Shows progress.
        device: As `bigstep train --device` takes it.
        retry: Run failed runs again.
    """
    if any(run.network for run in runs) and (reason := why_no_lab()):
        raise RunError(f"This suite runs on shaped links, but {reason}.")
    states = [state_of(run, root / run.name) for run in runs]  # a wrong folder is refused before the first run
    states = ["new" if state == "failed" and retry else state for state in states]
    finished: list[Finished] = []
    with locked(root), _stoppable(root), watch:
        watch.plan(runs, states, root)
        for run, state in zip(runs, states, strict=True):
            folder = root / run.name
            if state in ("finished", "failed"):
                finished.append(Finished(run, folder, True, failure_of(folder)))
                continue
            failure = _run_one(run, folder, state, suite, watch, device)
            finished.append(Finished(run, folder, False, failure))
    return finished


def _run_one(run: Planned, folder: Path, state: State, suite: str, watch: Watch, device: str) -> str | None:
    resume = prepare(run, folder, state)
    words = [*run.arguments(), "--out", str(folder), "--device", device, "--json", "--no-report"]
    words += ["--resume"] if resume else []
    log = folder.parent / "logs" / f"{run.name}.txt"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)  # never write through a link that somebody has put there
    watch.begin(run, folder)
    started = time.monotonic()
    failure = _in_laboratory(run, words) if run.network else _in_a_process(words, log, watch)
    wall_s = time.monotonic() - started
    mark(run, folder, suite, wall_s, failure)
    watch.end(run, folder, wall_s, failure)
    return failure


def _in_a_process(words: list[str], log: Path, watch: Watch) -> str | None:
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "BIGSTEP_LAUNCHER": str(os.getpid())}
    with open(log, "xb") as output:
        process = subprocess.Popen(
            program(*words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )
    try:
        while process.poll() is None:
            watch.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
    finally:  # Ctrl-C reached the run as well, and it saves itself; SIGTERM is passed on
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SAVING_S)
            process.kill()
            process.wait()
    return None if process.returncode == 0 else _sentence(log, process.returncode)


def _sentence(log: Path, status: int) -> str:
    """The last error sentence of a failed run, or else how it ended and the last line of its log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix("bigstep: ") for line in lines if line.startswith("bigstep: ")]
    if told:
        return told[-1]
    ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"The run {ending}: {lines[-1]}" if lines else f"The run {ending}."


def _in_laboratory(run: Planned, words: list[str]) -> str | None:
    assert run.network is not None
    network = run.network
    lab = Lab(network.hosts, network.rate, nodes=network.nodes, rate_between=network.rate_between)
    try:
        with lab:
            lab.run(Path(train_on_host.__file__), *words, timeout=_LAB_S)
    except ConfigError:
        raise
    except (BigstepError, json.JSONDecodeError) as error:
        return str(error).rpartition("bigstep: ")[2]  # the run's own sentence, if it printed one
    return None


@contextlib.contextmanager
def _stoppable(root: Path) -> Iterator[None]:
    """End a suite on SIGTERM as on Ctrl-C: the run under way is saved, and a message says how to continue."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise SuiteStoppedError(f"The suite was stopped; run the same command to continue it in {root}.") from None
    finally:
        signal.signal(signal.SIGTERM, before)
