"""Where an interrupted Downpour run goes on: from the checkpoints of its shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bigstep.config import RunConfig
from bigstep.config.edit import find_change
from bigstep.engine.checkpoint import load_latest
from bigstep.errors import ConfigError, DataError
from bigstep.records import read_run

__all__ = ["Progress", "saved_progress"]


@dataclass(frozen=True)
class Progress:
    """How far a run had come, according to its checkpoints."""

    versions: list[int]
    """Updates of each shard."""
    shares: int
    """Shares that every shard has seen; one that has seen more sees some again."""
    samples: int
    seconds: float

    @property
    def updates(self) -> int:
        """Updates that every shard has made."""
        return min(self.versions)


def saved_progress(folder: Path, config: RunConfig) -> Progress | None:
    """Read the shards' checkpoints; None if the run had not begun."""
    if not (folder / "run.json").exists():
        return None
    run = read_run(folder)
    if change := find_change(run.config, config):
        raise ConfigError(f"The run in {folder} {change}; leave that out, or start anew with another --out.")
    places = [folder / "checkpoints" / f"shard-{shard}" for shard in range(config.asynchronous.shards)]
    states = [load_latest(place)[0] for place in places]
    found = [state for state in states if state is not None]
    if not any(state["version"] for state in found):
        return None
    if len(found) < len(states):
        raise DataError(
            f"{places[states.index(None)]} holds no whole checkpoint, but other shards have one; start a new run "
            "with another --out."
        )
    updates = min(state["version"] for state in found)
    return Progress(
        versions=[state["version"] for state in found],
        shares=min(state["shares"] for state in found),
        samples=min(state["samples"] for state in found),
        seconds=max((row["seconds"] for row in run.train if row["step"] <= updates), default=0.0),
    )
