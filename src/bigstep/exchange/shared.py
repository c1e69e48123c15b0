"""Memory that the ranks of one host share: each writes its integers there, and all read them.

Integers that can be added in any order need no collective inside a host: a rank adds up what it reads of all others.
That saves the cost of sockets, which copy every byte into the kernel, out of it, and on.

The memory has no name in any file system (memfd), so nothing is left behind however the ranks end, and only processes
of the same user can open it. Messages between the ranks tell when each may read or write, and reveal a rank that has
died.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.world import World

__all__ = ["MOST_RANKS", "Regions", "SharedMemory"]

MOST_RANKS = 8
"""With more ranks a ring reads less: here each rank reads all that the others have written."""
_HEAD = 8
"""Random integers at the front, which tell this memory from any other."""
_NAME = "bigstep"


class Regions(NamedTuple):
    """One region of every rank's memory."""

    mine: Tensor
    """What this rank writes."""
    all: list[Tensor]
    """What all ranks write, this one among them."""


class SharedMemory:
    """A row of integers for each rank, cut into regions.

    Hazard: ranks must ask for the same regions in the same order.
    """

    def __init__(self, rows: Sequence[Tensor], rank: int) -> None:
        self._rows, self._rank = rows, rank
        self._regions: dict[tuple[int, ...], slice] = {}

    @classmethod
    def among(cls, world: World, values: int) -> SharedMemory | None:
        """Return memory for `values` integers of each rank, or None if ranks cannot share any; all must call this."""
        host = world.processes[world.rank][0]
        together = world.ranks_per_node >= world.size and all(where == host for where, _ in world.processes)
        mine = _Offered.make(values) if together and world.size <= MOST_RANKS else None
        offer: tuple[int, list[int]] | None = None if mine is None else (mine.descriptor, mine.token)
        offers: list[tuple[int, list[int]] | None] = [None] * world.size
        dist.all_gather_object(offers, offer, group=world.group)
        rows = [
            _open(process, each, values) if each is not None and mine is not None else None
            for (_, process), each in zip(world.processes, offers, strict=True)
        ]
        found = [row for row in rows if row is not None]
        opened: list[bool | None] = [None] * world.size
        dist.all_gather_object(opened, len(found) == world.size, group=world.group)
        if mine is not None:
            os.close(mine.descriptor)  # mappings stay valid without it
        return cls(found, world.rank) if all(opened) else None

    def regroup(self) -> None:
        """Forget the regions; nothing may be under way in them."""
        self._regions = {}

    def regions(self, name: tuple[int, ...], length: int) -> Regions | None:
        """Return the regions of that name and length; None if there is no room left for them."""
        if name not in self._regions:
            start = max((region.stop for region in self._regions.values()), default=0)
            self._regions[name] = slice(start, start + length)
        region = self._regions[name]
        assert region.stop - region.start == length
        if region.stop > self._rows[0].numel():
            return None
        rows = [row[region] for row in self._rows]
        return Regions(rows[self._rank], rows)


class _Offered(NamedTuple):
    """This rank's memory, for others to open, and what its head holds."""

    descriptor: int
    token: list[int]

    @classmethod
    def make(cls, values: int) -> _Offered | None:
        if not hasattr(os, "memfd_create"):  # only Linux has it
            return None
        with contextlib.suppress(OSError):
            descriptor, token = os.memfd_create(_NAME, os.MFD_CLOEXEC), secrets.token_bytes(8 * _HEAD)
            os.ftruncate(descriptor, 8 * (_HEAD + values))  # pages are allocated when written
            os.pwrite(descriptor, token, 0)
            return cls(descriptor, torch.frombuffer(bytearray(token), dtype=torch.int64).tolist())
        return None


def _open(process: int, offer: tuple[int, list[int]], values: int) -> Tensor | None:
    """Map the memory that a process of this host offers; None if it is not found, or is something else."""
    number, token = offer
    path = f"/proc/{process}/fd/{number}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # process numbers of another container
            return None
        row = torch.from_file(path, shared=True, size=_HEAD + values, dtype=torch.int64)  # keeps no descriptor
    except (OSError, RuntimeError):
        return None
    return row[_HEAD:] if row[:_HEAD].tolist() == token else None
