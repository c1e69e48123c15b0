"""Process groups that a run takes over from the runs before it.

A group has threads (those of Gloo wake a hundred times a second), connections and, with NCCL, memory of the device, and
torch keeps all of it until the default group is destroyed. A program that calls `fit` often would gather them.

Hazard: ranks must take over the same groups. So a world says what it is for, and one for the same over the same ranks
asks for the same groups in the same order; ranks tell each other which they hold when they join it, and begin with none
unless all hold the same; and a run that fails leaves none, since its ranks may be out of step in them.

Hazard: torch names a new group by its members and by a count of groups (`made` says which), whoever made them, so
members must count alike. Ranks tell each other that too when a world is joined, and those that were left out of some
make up for them.

Hazard: where the default group is bound to a device, as NCCL's is, torch would split a new group off it, which waits
for all ranks to call, also those that are no members, such as ranks that wait for a crew. So that device is hidden
while a group is made.
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
"""How many groups this rank is in, the number that it would give to the next world, and those that it holds."""


@dataclass
class Groups:
    """The process groups of one world, in the order in which it asks for them: those of an earlier one, or new ones."""

    number: int
    timeout: timedelta | None
    """Of every collective; None for torch's default."""
    _all: list[tuple[tuple[int, ...], weakref.ref[dist.ProcessGroup]]] = field(default_factory=list)
    _taken: int = 0

    def take(self, members: Sequence[int]) -> dist.ProcessGroup:
        """Return a group of these global ranks, among them this one, that nobody else in this world has.

        Hazard: every rank of the world must ask for as many groups, in the same order of kinds (rows before columns).
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
        """Make all of them free again."""
        self._taken = 0


@dataclass
class _Shelf:
    """What earlier worlds for the same, over the same ranks, have left."""

    next_number: int = 0
    left: dict[int, Groups] = field(default_factory=dict)


@dataclass
class _Held:
    """What this process has been left since it has the present default group."""

    shelves: dict[tuple[str, tuple[int, ...], timedelta | None], _Shelf] = field(default_factory=dict)


_held_by_default: weakref.WeakKeyDictionary[dist.ProcessGroup, _Held] = weakref.WeakKeyDictionary()
_borrowed: ContextVar[list[tuple[_Shelf, Groups]] | None] = ContextVar("borrowed groups", default=None)


@contextlib.contextmanager
def lending() -> Iterator[None]:
    """Let worlds that are joined inside take over groups, and leave theirs to others unless an error ends it."""
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
    """Return what this rank has for a world over these global ranks."""
    shelf = _shelf(purpose, ranks, timeout)
    left = sorted(shelf.left) if _borrowed.get() is not None else ()
    return (made(), shelf.next_number, *left)


def borrow(purpose: str, ranks: Sequence[int], timeout: timedelta | None, offers: Sequence[Offer]) -> Groups:
    """Return the groups of a new world.

    Args:
        purpose: What it is for; worlds with one purpose ask for the same groups in the same order.
        ranks: Its global ranks.
        timeout: Of every collective; None for torch's default.
        offers: What `offer` said on each of its ranks, the same list on all of them.
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
        groups = shelf.left.pop(same[0])  # the first world of a run gets what the first of another has left
    if len(numbers) > 1:
        shelf.left.clear()
    if purpose and (borrowed := _borrowed.get()) is not None:
        borrowed.append((shelf, groups))
    return groups


def made() -> int:
    """Return the number by which torch tells groups of the same ranks apart; all who make one must have the same.

    It is how many groups this process is in, a program's own among them; from torch 2.15 on, how many it has made.
    """
    torchs = dist.distributed_c10d
    counts_calls = "group_count" in torchs._hash_ranks_to_str.__code__.co_names
    return torchs._world.group_count if counts_calls else len(torchs._world.pg_names)


def _make(ranks: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a group by its members alone; with NCCL it gets a communicator of its own when it is first used."""
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
