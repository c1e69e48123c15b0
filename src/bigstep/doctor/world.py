"""One run of a program: what each of its processes did, gathered from the files that they wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from bigstep.doctor.facts import KINDS, Backward, Event, Forward, Group, Start, Update

__all__ = ["Process", "World", "load_world", "read_world", "write_world"]

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Process:
    """All events of one process, in order."""

    events: list[Event]
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
    """stopped, finished, failed, hung, or late: still at work when its time was over."""
    message: str = ""
    output: str = ""
    seconds: float = 0.0
    started: int = 1
    """Processes that the examination started."""

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
        yield _event(values.pop("kind"), values)


def _event(kind: str, values: dict[str, Any]) -> Event:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return KINDS[kind](**fields)


def read_world(folder: Path, **about: Any) -> World:
    """Gather what the processes of one run wrote into a folder."""
    processes = []
    for path in sorted(folder.glob("*.jsonl")):
        events = list(read_events(path))
        joined = next((e for e in events if isinstance(e, Group)), None)
        start = next((e for e in events if isinstance(e, Start)), None)
        rank = joined.rank if joined else start.rank if start else 0
        world = joined.world if joined else start.world if start else 1
        processes.append(Process(events, rank, world))
    return _gather(processes, **about)


def _gather(processes: Sequence[Process], **about: Any) -> World:
    """Separate the ranks, which train, from the processes beside them."""
    kinds = Update | Forward | Backward | Group
    trains = [any(isinstance(event, kinds) for event in process.events) for process in processes]
    ranks = sorted((p for p, t in zip(processes, trains, strict=True) if t), key=lambda process: process.rank)
    return World(ranks, [p for p, t in zip(processes, trains, strict=True) if not t], **about)


def write_world(world: World, path: Path) -> None:
    """Write a run as one file of JSON lines: a line about the run, then every process with its events."""
    about = {"ended": world.ended, "message": world.message, "started": world.started}
    lines = [json.dumps({"kind": "run", **about})]
    for process in world.everything:
        lines.append(json.dumps({"kind": "process", "rank": process.rank, "world": process.world}))
        lines += [event.to_json() for event in process.events]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load_world(path: Path) -> World:
    """Read a run that `write_world` wrote."""
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    about = json.loads(first)
    del about["kind"]
    processes: list[Process] = []
    for line in lines:
        values = json.loads(line)
        kind = values.pop("kind")
        if kind == "process":
            processes.append(Process([], values["rank"], values["world"]))
        else:
            processes[-1].events.append(_event(kind, values))
    return _gather(processes, **about)
