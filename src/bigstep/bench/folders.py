"""What the folder of a planned run says about it, and what a suite writes into it: label, wall time, failure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from bigstep.bench.planned import Planned
from bigstep.config.edit import same_experiment
from bigstep.config.text import config_from_mapping, config_to_mapping
from bigstep.errors import ConfigError
from bigstep.records import FILES, RunWriter, json_text, read_run, write_atomically

__all__ = ["State", "failure_of", "mark", "prepare", "state_of", "wall_seconds"]

State = Literal["new", "finished", "failed", "unfinished"]


def state_of(run: Planned, folder: Path) -> State:
    """Return how far a planned run is; a folder with another experiment is refused, never added to or replaced."""
    if not (folder / "run.json").exists():
        return "new"
    facts = read_run(folder).facts
    try:
        same = same_experiment(config_from_mapping(facts.get("config")), run.config())
    except ConfigError:
        same = False  # written by another version, with fields that this one does not have
    asynchronous = run.config().asynchronous.method != "none"
    if not same or (facts.get("ranks", run.ranks) != run.ranks and not asynchronous):
        raise ConfigError(
            f"{folder} holds a run with other settings than the suite asks for now; choose another --out, or remove it."
        )
    if facts.get("result"):
        return "finished"
    return "failed" if facts.get("bench", {}).get("failure") else "unfinished"


def prepare(run: Planned, folder: Path, state: State) -> bool:
    """Make the folder ready for `bigstep train` and return whether to resume.

    Only a synchronous run with a checkpoint can be resumed; any other starts over, so its files are removed.
    """
    resume = state == "unfinished" and run.config().asynchronous.method == "none" and _has_checkpoint(folder)
    if not resume and folder.exists():
        strangers = sorted(path.name for path in folder.iterdir() if not _is_ours(path))
        if strangers:
            raise ConfigError(f"{folder} holds {strangers[0]}, which no run wrote; move it, or choose another --out.")
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return resume


def mark(run: Planned, folder: Path, suite: str, wall_s: float, failure: str | None = None) -> None:
    """Write what the suite knows about a run into its records, which are created if it failed before it had any."""
    if not (folder / "run.json").exists():
        RunWriter(folder, config_to_mapping(run.config()), ranks=run.ranks).close()
    facts = json.loads((folder / "run.json").read_bytes())
    known: dict[str, Any] = {"suite": suite, "label": run.label, "wall_s": round(wall_s, 3)}
    if run.network is not None:
        known["network"] = vars(run.network)
    if run.without:
        known["without"] = run.without
    if failure is not None:
        known["failure"] = failure
    facts["bench"] = known
    write_atomically(folder / "run.json", (json_text(facts, indent=1) + "\n").encode())


def failure_of(folder: Path) -> str | None:
    """Return the error of a run that failed, or else None."""
    facts = read_run(folder).facts
    failure = facts.get("bench", {}).get("failure")
    return str(failure) if failure else None


def wall_seconds(folder: Path) -> float | None:
    """Return the wall time of a run, start-up and shutdown included; None if it is not recorded."""
    wall_s = read_run(folder).facts.get("bench", {}).get("wall_s")
    return float(wall_s) if isinstance(wall_s, int | float) else None


def _is_ours(path: Path) -> bool:
    return path.name in FILES or path.name.startswith("error-rank-") or path.name.endswith(".part")


def _has_checkpoint(folder: Path) -> bool:
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(path.suffix == ".ckpt" for path in checkpoints.iterdir())
