"""Process groups that a run takes over from earlier runs.

A group has threads (Gloo's wake a hundred times a second), connections and, with NCCL, device memory, and torch keeps
all of it until the default group is destroyed. In a program that calls `fit` often they would accumulate.

Hazard: all ranks must take over the same groups. So each world has a purpose, and worlds with the same purpose over the
same ranks ask for the same groups in the same order. Ranks that join a world tell each other which groups they hold,
and begin with none unless all hold the same. A run that fails leaves no groups, since its ranks may be out of step.

Hazard: torch names a new group by its members and by a count of groups (`made` says which), those of the program
included, so all members must have the same count. Ranks that join a world tell each other their counts too, and a rank
that was left out of some groups makes up for them.

Hazard: if the default group is bound to a device, as with NCCL, torch would split a new group off it, which waits for
a call from every rank, even from those that are not members, such as ranks that wait for a crew. So the device is
hidden while a group is made.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

__all__ = ["Groups", "Offer", "borrow", "lending", "made", "offer"]

Offer = tuple[int, ...]
"""This rank's count of groups (`made`), its number for the next world, and the numbers of worlds whose groups it holds.
"""


@dataclass
class Groups:
    """The process groups of one world, in the order in which it asks for them: from an earlier world, or new."""

    number: int
    timeout: timedelta | None
    """Of every collective; None for torch's default."""
    _all: list[tuple[tuple[int, ...], weakref.ref[dist.ProcessGroup]]] = field(default_factory=list)
    _taken: int = 0

    def take(self, members: Sequence[int]) -> dist.ProcessGroup:
        """Return a group of these global ranks (this one included) that this world gives out only once.

        Hazard: every rank of the world must ask for equally many groups, of the same kinds in the same order (rows
        before columns).
        """
        wanted = tuple(members)
        if self._taken == len(self._all):
            self._all.append((wanted, weakref.ref(group := _make(wanted, self.timeout))))
        else:
            ranks, kept = self._all[self._taken]
            assert ranks == wanted, f"asked for {wanted} where the world before had {ranks}"
            found = kept()
            assert found is not None, "torch keeps groups as long as the default group"
            group = found
        self._taken += 1
        return group

    def free(self) -> None:
        """Let all of them be taken again."""
        self._taken = 0


@dataclass
class _Shelf:
    """Groups that earlier worlds with one purpose, over the same ranks, have left."""

    next_number: int = 0
    left: dict[int, Groups] = field(default_factory=dict)


@dataclass
class _Held:
    """All groups that worlds have left in this process since the present default group was made."""

    shelves: dict[tuple[str, tuple[int, ...], timedelta | None], _Shelf] = field(default_factory=dict)


_held_by_default: weakref.WeakKeyDictionary[dist.ProcessGroup, _Held] = weakref.WeakKeyDictionary()
_borrowed: ContextVar[list[tuple[_Shelf, Groups]] | None] = ContextVar("borrowed groups", default=None)


@contextlib.contextmanager
def lending() -> Iterator[None]:
    """Let worlds joined inside take over groups, and leave theirs to later worlds unless an error ends the context."""
    borrowed: list[tuple[_Shelf, Groups]] = []
    before = _borrowed.set(borrowed)
    try:
        yield
    finally:
        _borrowed.reset(before)
    for shelf, groups in borrowed:
        groups.free()
        shelf.left[groups.number] = groups


def offer(purpose: str, ranks: Sequence[int], timeout: timedelta | None) -> Offer:
    """Return what this rank can contribute to a world over these global ranks."""
    shelf = _shelf(purpose, ranks, timeout)
    left = sorted(shelf.left) if _borrowed.get() is not None else ()
    return (made(), shelf.next_number, *left)


def borrow(purpose: str, ranks: Sequence[int], timeout: timedelta | None, offers: Sequence[Offer]) -> Groups:
    """Return the groups of a new world.

    Args:
        purpose: What it is for; worlds with the same purpose ask for the same groups in the same order.
        ranks: Its global ranks.
        timeout: Of every collective; None for torch's default.
        offers: What `offer` returned on each of its ranks; the same list on all of them.
    """
    most = max(each[0] for each in offers)
    while made() < most:
        _make((dist.get_rank(),), None)
    shelf = _shelf(purpose, ranks, timeout)
    numbers = {each[2:] for each in offers}
    same = len(numbers) == 1 and offers[0][2:]
    if not same:
        groups = Groups(max(each[1] for each in offers), timeout)
        shelf.next_number = groups.number + 1
    else:
        groups = shelf.left.pop(same[0])  # a run's first world gets what another run's first has left
    if len(numbers) > 1:
        shelf.left.clear()
    if purpose and (borrowed := _borrowed.get()) is not None:
        borrowed.append((shelf, groups))
    return groups


def made() -> int:
    """Return the number by which torch tells groups of the same ranks apart; all members of a new one must agree on it.

    It is the number of groups that this process is in, the program's own included; from torch 2.15 on, the number that
    it has made.
    """
    torchs = dist.distributed_c10d
    counts_calls = "group_count" in torchs._hash_ranks_to_str.__code__.co_names
    return torchs._world.group_count if counts_calls else len(torchs._world.pg_names)


def _make(ranks: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a group without other ranks; with NCCL it gets a communicator of its own when it is first used."""
    default = dist.group.WORLD
    assert default is not None
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        default.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup)
    return group


def _shelf(purpose: str, ranks: Sequence[int], timeout: timedelta | None) -> _Shelf:
    return _held().shelves.setdefault((purpose, tuple(ranks), timeout), _Shelf())


def _held() -> _Held:
    default = dist.group.WORLD
    assert default is not None
    return _held_by_default.setdefault(default, _Held())
