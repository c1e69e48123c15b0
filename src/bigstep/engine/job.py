"""A run that is ready to start: what was typed, resolved once, before any process is started."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigstep.config import RunConfig
from bigstep.config.text import config_from_mapping, config_to_mapping
from bigstep.records import write_atomically

__all__ = ["JOB_VARIABLE", "Job"]

JOB_VARIABLE = "BIGSTEP_JOB"
"""Names the file that a launcher writes for its ranks."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the command line; it travels to the ranks as a file, so that they resolve nothing again."""

    config: RunConfig
    folder: Path
    resume: bool = False
    steps: int | None = None
    """Stop after so many steps."""
    profile: int = 0
    """Steps to profile."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the records say about the run besides its configuration."""
    device: str = "auto"
    timeout_s: float = 600.0
    trackers: tuple[str, ...] = ()
    """Programs that get every row: tensorboard, wandb, mlflow."""
    listen: str = "127.0.0.1:0"
    """Where processes of other machines find a Downpour run."""
    elsewhere: tuple[int, int] = (0, 0)
    """Shards and replicas that they bring."""
    said: tuple[str, ...] = ()
    """What the launcher has to say about this start, for the records."""
    survivors: bool = False
    """A rank was lost, and this run continues with what the others saved."""
    report: bool = True
    as_json: bool = False

    def write(self, path: Path) -> None:
        """Write the job for ranks to read."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {**fields, "config": config_to_mapping(self.config), "folder": str(self.folder)}
        write_atomically(path, json.dumps(plain).encode())

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what `write` wrote."""
        plain: dict[str, Any] = json.loads(path.read_bytes())
        config = config_from_mapping(plain.pop("config"))
        plain |= {name: tuple(plain[name]) for name in ("trackers", "elsewhere", "said")}
        return cls(config=config, folder=Path(plain.pop("folder")), **plain)
