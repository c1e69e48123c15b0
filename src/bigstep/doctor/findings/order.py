"""Order: all ranks must call the same collectives in the same order, or they wait for each other for ever."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from bigstep.doctor.facts import Backward, Collective, End, Event, Forward, Group, Update
from bigstep.doctor.finding import Case, Finding, Rule, Unseen
from bigstep.doctor.world import Process, World

__all__ = ["RULES"]


def waiting_ranks(case: Case) -> Iterator[Finding]:
    """A rank waits in a collective that another one never calls."""
    world = case.several
    if world.first(Group) is None:
        raise Unseen("the ranks never join a process group")
    if world.ended not in ("hung", "failed"):
        return
    stuck = [(process, call) for process in world.ranks if (call := _pending(process)) is not None]
    parted = _parted(world)
    if world.ended == "failed" and any(_fell(process) for process in world.ranks):
        return  # the others wait for a rank that failed; its error is reported as the trouble
    if parted is not None:
        first, other, a, b, position = parted
        yield Finding(
            name="waiting-ranks",
            title="ranks call different collectives",
            evidence=f"of the collective calls that ranks {first} and {other} share, number {position + 1} is "
            f"{_words(a)} on rank {first} and {_words(b)} on rank {other}",
            cost="each rank waits for what the other never sends: the run hangs, or tensors are mixed up",
            remedy="let every rank call the same collectives in the same order: no collective under `if rank == "
            "0`, and none that depends on a rank's own data (a gradient that is None on one rank)",
            likelihood=0.97,
            line=next((call.line for call in (a, b) if call is not None), ""),
        )
    elif world.ended == "hung" and (stuck or world.first(Update)):
        last = [f"rank {process.rank} {_last(process)}" for process in world.ranks]
        yield Finding(
            name="waiting-ranks",
            title="ranks wait for each other",
            evidence="; ".join(last),
            cost="the run hangs",
            remedy="give every rank the same number of batches (drop_last, or DDP's join()), and make sure "
            "that all ranks reach every forward of the wrapper and every collective",
            likelihood=0.9,
            line=stuck[0][1].line if stuck else _line(world.ranks[0]),
        )


_OF_OTHERS = ("gloo", "NCCL", "ProcessGroup", "onnection", "ollective", "imed out", "pipe", "Socket", "recv")
"""Words in the error of a rank that failed in a collective, through what other ranks did or did not do."""


def _fell(process: Process) -> bool:
    """Whether a rank ended with an error of its own."""
    ends = [event for event in process.all(End) if event.reason == "failed"]
    return any(not any(word in event.message for word in _OF_OTHERS) for event in ends)


def _pending(process: Process) -> Collective | None:
    """Return the collective that a rank began and never finished."""
    calls = process.all(Collective)
    return calls[-1] if calls and not calls[-1].done else None


def _parted(world: World) -> tuple[int, int, Collective | None, Collective | None, int] | None:
    """Return the first call in which two ranks differ: the ranks, their calls, and its position."""
    for one, other in itertools.combinations(world.ranks, 2):
        pairs = itertools.zip_longest(_shared(one, other), _shared(other, one))
        for position, (a, b) in enumerate(pairs):
            if a is None or b is None or (a.operation, a.values, a.group) != (b.operation, b.values, b.group):
                return one.rank, other.rank, a, b, position
    return None


def _shared(process: Process, other: Process) -> list[Collective]:
    """Return a rank's calls in groups that another rank belongs to."""
    calls = [call for call in process.all(Collective) if not call.done]
    return [call for call in calls if not call.group or other.rank in call.group]


def _words(call: Collective | None) -> str:
    if call is None:
        return "missing"
    among = f" among ranks {', '.join(map(str, call.group))}" if call.group else ""
    return f"{call.operation} of {call.values:,} values{among} ({call.line})"


def _last(process: Process) -> str:
    kinds: tuple[type[Event], ...] = (Update, Backward, Forward, Collective)
    event = next((e for e in reversed(process.events) if isinstance(e, kinds)), None)
    return f"was last seen at {event.kind} ({event.line})" if event else "was never seen training"


def _line(process: Process) -> str:
    return next((event.line for event in reversed(process.events) if event.line), "")


RULES: tuple[Rule, ...] = (waiting_ranks,)
