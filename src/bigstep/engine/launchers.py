"""What started this process: torchrun, srun, mpirun, or a person directly. Imports no torch."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from bigstep.errors import ConfigError

__all__ = ["LOOPBACK", "Place", "adopt_launcher", "copies_alone"]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The network interface through which ranks of one machine communicate."""

_NAMES = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}  # fmt: skip
"""By launcher: the variables that hold rank, size, local rank and local size. Slurm's batch script itself has a rank,
but no step of several tasks."""
_JOB_NUMBERS = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables with the same value on all ranks of a job. Hydra (MPICH, Intel MPI) has none: its PMI_ID is the rank, and
its other numbers differ from machine to machine."""


@dataclass(frozen=True)
class Place:
    """This process among those that were started with it."""

    rank: int
    size: int


def adopt_launcher(environment: MutableMapping[str, str] = os.environ) -> Place | None:
    """Find this process's place, and set the variables from which torch reads it; None if it is alone.

    >>> step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "17",
    ...         "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[08-09]"}
    >>> adopt_launcher(step), step["LOCAL_WORLD_SIZE"], step["MASTER_ADDR"]
    (Place(rank=3, size=4), '2', 'gpu08')
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        for launcher, names in _NAMES.items():
            if environment.get(names[1], "1") != "1" and names[0] in environment:
                _translate(launcher, names, environment)
                break
        else:
            return None
    rank, size = (_number(name, environment) for name in ("RANK", "WORLD_SIZE"))
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {size}, but ranks are numbered from 0 to WORLD_SIZE - 1.")
    for name, usual in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)):
        environment.setdefault(name, str(usual))
        _number(name, environment)
    if _number("LOCAL_WORLD_SIZE", environment) == 0:
        raise ConfigError("LOCAL_WORLD_SIZE is 0, but it must be the number of ranks on this machine: 1 or more.")
    if size > 1 and "BIGSTEP_STORE" not in environment:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {size}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so "
                "the ranks cannot meet: start them with torchrun, srun or mpirun, or use --procs."
            )
        _number("MASTER_PORT", environment)
    return Place(rank, size)


def _translate(launcher: str, names: tuple[str, str, str, str], environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from another launcher's."""
    rank, size, local_rank, local_size = names
    environment["RANK"], environment["WORLD_SIZE"] = environment[rank], environment[size]
    environment["LOCAL_RANK"] = environment.get(local_rank, environment[rank])
    tasks = environment.get(local_size, environment[size])
    environment["LOCAL_WORLD_SIZE"] = max(re.findall(r"(\d+)(?:\(x\d+\))?", tasks), key=int, default=tasks)
    if "MASTER_ADDR" not in environment:
        if launcher == "srun":
            environment["MASTER_ADDR"] = _first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
        elif environment["LOCAL_WORLD_SIZE"] == environment["WORLD_SIZE"]:
            environment["MASTER_ADDR"] = "127.0.0.1"
    job = "-".join(environment.get(name, "") for name in (*_JOB_NUMBERS, "SLURM_STEP_ID"))
    environment.setdefault("MASTER_PORT", str(20_000 + zlib.crc32(job.encode()) % 12_000))  # below ephemeral ports


def _first_host(hosts: str) -> str:
    """Return the first host of Slurm's list.

    >>> _first_host("gpu[08-09,12]"), _first_host("a1,a2"), _first_host("rack[2,4]-n7")
    ('gpu08', 'a1', 'rack2-n7')
    """
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", hosts)[0])


def _number(name: str, environment: MutableMapping[str, str]) -> int:
    text = environment.get(name)
    if text is None:
        raise ConfigError(f"{name} is not set, though other variables say that this is one rank of several.")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{name} is {text!r:.40}, but it must be a whole number, as torchrun sets it.")
    return int(text)


def copies_alone() -> int:
    """Return how many processes of the same parent run this very command; each would train a run of its own."""
    try:
        mine = Path("/proc/self/cmdline").read_bytes()
        parent = os.getppid()
        siblings = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:  # not Linux, or the parent is another user's
        return 1
    if not mine.endswith("".join(f"{word}\0" for word in sys.argv[1:]).encode()):
        return 1  # another program, which calls this one
    return max(1, sum(_command_line(process) == mine for process in siblings))


def _command_line(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
