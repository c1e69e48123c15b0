"""What a result was measured on: hardware, versions, the commit of the code; and how many cores are ours to use."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import bigstep

__all__ = ["describe_machine", "usable_cores"]

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The CPU limit of a container: microseconds of CPU time (or max), and the period for them, in microseconds."""


def describe_machine() -> dict[str, Any]:
    """Describe hardware, versions and the code's commit, without importing torch."""
    versions = {"python": platform.python_version(), "bigstep": bigstep.__version__}
    for package in ("torch", "numpy", "numba", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "hardware": {"processor": _processor(), "cores": os.cpu_count() or 1, "system": platform.platform()},
        "versions": versions,
        "commit": _commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def usable_cores() -> int:
    """Return how many cores this process may use: a job or a container may be given fewer than its machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # not Linux, or no limit
        microseconds, period = map(int, _QUOTA.read_text().split())
        cores = min(cores, max(1, -(-microseconds // period)))
    return cores


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit of the source checkout, with + if it was changed; empty for an installed package."""
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
