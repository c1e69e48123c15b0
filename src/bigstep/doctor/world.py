"""One run of a program: what each of its processes did, gathered from the files that they wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from bigstep.doctor.facts import KINDS, Backward, Event, Forward, Group, Start, Update

__all__ = ["Process", "World", "read_world"]

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Process:
    """All events of one process, in order."""

    events: Sequence[Event]
    rank: int
    world: int

    def all(self, kind: type[E]) -> list[E]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def first(self, kind: type[E]) -> E | None:
        """Return the first event of one kind."""
        return next((event for event in self.events if isinstance(event, kind)), None)


@dataclass(frozen=True)
class World:
    """One run of the program: its ranks, and loader processes beside them."""

    ranks: Sequence[Process]
    helpers: Sequence[Process] = ()
    """Processes that trained nothing: loader processes, launchers."""
    ended: str = "stopped"
    """stopped, finished, failed, or hung."""
    message: str = ""
    output: str = ""
    seconds: float = 0.0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def everything(self) -> Sequence[Process]:
        """Ranks and helpers."""
        return [*self.ranks, *self.helpers]

    def all(self, kind: type[E]) -> list[E]:
        """Return the events of one kind, rank after rank."""
        return [event for process in self.ranks for event in process.all(kind)]

    def first(self, kind: type[E]) -> E | None:
        """Return the first event of one kind on the lowest rank that has one."""
        return next(iter(self.all(kind)), None)


def read_events(path: Path) -> Iterator[Event]:
    """Read a file of events; a last line that was cut off is left out."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(text)
        except json.JSONDecodeError:
            continue
        kind = KINDS[values.pop("kind")]
        yield kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def read_world(folder: Path, *, ended: str = "stopped", message: str = "", **facts: Any) -> World:
    """Gather what the processes of one run wrote into a folder."""
    ranks: list[Process] = []
    helpers: list[Process] = []
    for path in sorted(folder.glob("*.jsonl")):
        events = list(read_events(path))
        joined = next((e for e in events if isinstance(e, Group)), None)
        start = next((e for e in events if isinstance(e, Start)), None)
        rank = joined.rank if joined else start.rank if start else 0
        world = joined.world if joined else start.world if start else 1
        trains = any(isinstance(e, Update | Forward | Backward | Group) for e in events)
        (ranks if trains else helpers).append(Process(events, rank, world))
    ranks.sort(key=lambda process: process.rank)
    return World(ranks, helpers, ended, message, **facts)
