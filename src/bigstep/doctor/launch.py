"""Start the user's program as ranks, as torchrun would, watch them, and leave no process behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bigstep
from bigstep.doctor.facts import End, Update
from bigstep.doctor.settings import VARIABLE, Settings
from bigstep.doctor.world import World, read_world

__all__ = ["Limits", "explain", "run_world"]

_SITE = "from bigstep.doctor.observe.attach import attach\n\nattach(__file__)\n"
"""Python imports `sitecustomize` from PYTHONPATH first, so that observers also reach ranks that a script starts."""


_PARTNER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "recvBytes")
"""Words in the error of a rank that lost its connection to another; the other rank's error says more."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds that a run may take."""

    total_s: float = 120.0
    stall_s: float = 30.0
    """A run without a new fact, and with less than a tenth of this on processors, for so long is taken to hang."""
    grace_s: float = 6.0
    """For the other ranks to end once one has ended."""


def run_world(command: Sequence[str], settings: Settings, folder: Path, limits: Limits, *, gpus: bool) -> World:
    """Run a command on as many ranks as the settings say, and return what they did.

    Args:
        command: What follows the interpreter: a script with its arguments, or -m and a module.
        settings: What the observers are told.
        folder: The working directory of the ranks.
        limits: How long it may take.
        gpus: Whether the ranks may see the machine's GPUs.
    """
    began = time.monotonic()
    port = _free_port()
    settings = dataclasses.replace(settings, port=port)
    count = 1 if settings.starts_itself else settings.ranks
    ranks = [_start(rank, count, command, settings, folder, gpus=gpus) for rank in range(count)]
    try:
        ended = _watch(ranks, Path(settings.facts), limits)
    finally:
        _end(ranks, settings.facts)
    world = read_world(Path(settings.facts), seconds=time.monotonic() - began, output=_output(settings))
    message = ""
    if ended == "failed":
        ends = [e for process in world.everything for e in process.all(End)]
        said = [e.message for e in ends if e.reason == "failed"]
        own = [text for text in said if not any(word in text for word in _PARTNER_GONE)]
        if said and not own and any(e.reason == "stopped" for e in ends):
            ended = "stopped"  # one rank was stopped by us, and the others only lost their connection to it
        else:
            statuses = [rank.returncode for rank in ranks if rank.returncode]
            words = [*own, *said, _last_words(settings), f"status {statuses[0] if statuses else '?'}"]
            message = next(filter(None, words))
    elif ended == "ended":
        reasons = {e.reason for process in world.ranks for e in process.all(End)}
        ended = "stopped" if "stopped" in reasons else "finished"
    return dataclasses.replace(world, ended=ended, message=message, started=count)


def _start(
    rank: int, count: int, command: Sequence[str], settings: Settings, folder: Path, *, gpus: bool
) -> subprocess.Popen[bytes]:
    home = Path(bigstep.__file__).parents[1]
    site = Path(settings.facts) / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    path = [str(site)] + ([] if home.name in ("site-packages", "dist-packages") else [str(home)])
    environment = os.environ | settings.to_environment()
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(settings.port),
        "TORCHELASTIC_RUN_ID": "bigstep-doctor",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(path + [p for p in [os.environ.get("PYTHONPATH", "")] if p]),
        "WANDB_MODE": "offline",
        "BIGSTEP_DOCTOR_PARENT": str(os.getpid()),
    }
    if not gpus:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    with open(Path(settings.facts) / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that what it starts can be ended with it
        )


def _watch(ranks: Sequence[subprocess.Popen[bytes]], facts: Path, limits: Limits) -> str:
    """Return how the run ended: ended, failed, hung, or late: still at work when its time was over."""
    began = moved = time.monotonic()
    size, leaving, worked = -1, 0.0, 0.0
    while True:
        now = time.monotonic()
        running = [rank for rank in ranks if rank.poll() is None]
        if not running:
            return "failed" if any(rank.returncode for rank in ranks) else "ended"
        written = sum(path.stat().st_size for path in facts.iterdir())
        busy = sum(_processor_s(rank.pid) for rank in running)
        if written != size or busy > worked + limits.stall_s / 10:  # preparing data writes no facts
            size, worked, moved = written, busy, now
        if len(running) < len(ranks) or len(list(facts.glob("*.done"))) >= len(ranks):
            leaving = leaving or now
        if leaving and now - leaving > limits.grace_s:
            return "failed" if any(rank.returncode for rank in ranks) else "ended"
        if now - moved > limits.stall_s:
            return "hung"
        if now - began > limits.total_s:
            return "late" if now - moved < limits.total_s / 2 else "hung"
        time.sleep(0.05)  # polling children, not synchronising with them


def _processor_s(pid: int) -> float:
    """Return the processor time of a process in seconds; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _end(ranks: Sequence[subprocess.Popen[bytes]], facts: str) -> None:
    """Kill the ranks and all that they started, found by process group and by the mark in the environment."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()
    mark = f'{VARIABLE}={{"facts": "{facts}"'.encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _output(settings: Settings) -> str:
    log = Path(settings.facts) / "rank-0.log"
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def _last_words(settings: Settings) -> str:
    """Return the last line of the first rank that printed anything."""
    for rank in range(settings.ranks):
        log = Path(settings.facts) / f"rank-{rank}.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        if lines:
            return lines[-1][:300]
    return ""


def explain(world: World) -> str:
    """Say in one sentence why a run failed, hung or was late."""
    said = world.message
    if world.ended == "hung":
        return "it stood still, doing no work, until the doctor ended it"
    if world.ended == "late":
        none = "" if world.all(Update) else ", and no torch optimizer took a step"
        return f"its time ran out before all updates were seen{none}; give it more with --timeout"
    if "EOFError" in said and "reading a line" in said:
        return f"it asked for input, and standard input is empty ({said})"
    gpu = ("No CUDA GPUs", "not compiled with CUDA", "no NVIDIA driver", "No HIP GPUs", "CUDA driver", "GPU modules")
    if any(word in said for word in gpu):
        return f"it needs a GPU, and its ranks ran without GPUs ({said})"
    if "FileNotFoundError" in said and "'../" in said:
        return f"it runs in a copy of this folder, but reads a file beside it; start it from the folder above ({said})"
    if "ModuleNotFoundError" in said:
        return f"it needs a package that is not installed here ({said})"
    if "bigstep doctor keeps" in said:
        return f"it was about to change a file of yours, and was stopped ({said})"
    return said.rstrip(". ") or "it failed without a message"
