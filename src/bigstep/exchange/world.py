"""The ranks that exchange gradients: who they are, which nodes they lie on, and the groups a collective needs."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from bigstep.errors import ConfigError
from bigstep.exchange.groups import Groups, Offer, borrow, offer
from bigstep.tables.collectives import choose_grid

__all__ = ["World"]


@dataclass(frozen=True)
class World:
    """Rank, size, nodes and grid of the ranks that exchange gradients.

    Rank r is at x = r mod X, y = r div X in the X x Y grid. The automatic choice makes X the ranks of one node, or of
    several whole ones where that takes fewer rounds. A node is `ranks_per_node` consecutive ranks, in torchrun's order.
    """

    group: dist.ProcessGroup
    """All members; for everything but the exchange of gradients."""
    rank: int
    """Of this process, among `ranks`."""
    ranks: tuple[int, ...]
    """Global ranks of the members, in order."""
    ranks_per_node: int
    """Members on one node."""
    grid: tuple[int, int]
    """X and Y."""
    timeout: timedelta
    """How long a collective may take before its ranks give up."""
    processes: tuple[tuple[str, int], ...]
    """Host name and process number of each member, to name a rank that died."""
    groups: Groups
    """Where `new_group` takes groups from."""

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    @classmethod
    def join(
        cls,
        group: dist.ProcessGroup,
        *,
        ranks_per_node: int = 0,
        grid: Literal["auto"] | tuple[int, int] = "auto",
        timeout: timedelta = timedelta(minutes=5),
        purpose: str = "",
    ) -> World:
        """Describe the members of `group`; every one of them must call this.

        Args:
            group: For example the process group of a DistributedDataParallel object.
            ranks_per_node: 0 takes torchrun's LOCAL_WORLD_SIZE if it is set, or else counts all ranks as one node.
            grid: X and Y of a torus, or auto.
            timeout: Of every collective on groups made from this world.
            purpose: What it is for. Inside `lending`, worlds with the same purpose take over each other's groups, and
                must ask for the same groups in the same order; without a purpose all groups are new.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        size = len(ranks)
        per_node = min(ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", size)), size)
        X, Y = choose_grid(size, per_node) if grid == "auto" else grid
        if size != X * Y:
            raise ConfigError(
                f"A grid of {X} x {Y} has {X * Y} places, but there are {size} ranks: change exchange.grid."
            )
        purpose = purpose and f"{purpose}, {per_node} a node, {X} x {Y}"
        members: list[tuple[str, int, Offer] | None] = [None] * size
        dist.all_gather_object(
            members, (socket.gethostname(), os.getpid(), offer(purpose, ranks, timeout)), group=group
        )
        known = [member for member in members if member is not None]
        groups = borrow(purpose, ranks, timeout, [offered for _, _, offered in known])
        processes = tuple((host, process) for host, process, _ in known)
        return cls(group, dist.get_rank(group), ranks, per_node, (X, Y), timeout, processes, groups)

    def everyone(self) -> list[int]:
        """All members."""
        return list(range(self.size))

    def row(self) -> list[int]:
        """The members with this rank's y: X neighbours."""
        X = self.grid[0]
        return list(range(self.rank // X * X, self.rank // X * X + X))

    def column(self) -> list[int]:
        """The members with this rank's x, one in each row."""
        return list(range(self.rank % self.grid[0], self.size, self.grid[0]))

    def node(self) -> list[int]:
        """The members on this rank's node; the first is its leader."""
        first = self.rank // self.ranks_per_node * self.ranks_per_node
        return list(range(first, min(first + self.ranks_per_node, self.size)))

    def peers(self) -> list[int]:
        """The members with this rank's place in their node, one of each node; a leader's peers are the leaders."""
        return list(range(self.rank % self.ranks_per_node, self.size, self.ranks_per_node))

    def new_group(self, members: list[int]) -> dist.ProcessGroup:
        """A process group of these members (this rank included), given out only once; see `Groups.take`."""
        assert self.rank in members
        return self.groups.take([self.ranks[member] for member in members])

    def dead_ranks(self) -> list[int]:
        """Members on this host whose process has ended; those on other hosts cannot be checked from here."""
        host = socket.gethostname()
        return [r for r, (where, pid) in enumerate(self.processes) if where == host and not _lives(pid)]

    def say_why(self, error: BaseException) -> str:
        """Why a collective failed: which ranks of this host have ended, and what the backend says."""
        patience = time.monotonic() + 2.0  # a rank may take a moment to end after its connections closed
        while not (dead := self.dead_ranks()) and time.monotonic() < patience:
            time.sleep(0.05)
        ended = f"rank {dead[0]} has" if len(dead) == 1 else f"ranks {', '.join(map(str, dead))} have"
        who = f"{ended} ended" if dead else "no rank of this host has ended"
        return f"{who}; the backend says: {_in_short(error)}"


def _in_short(error: BaseException) -> str:
    """What a backend says, without the source location and the advice.

    >>> _in_short(RuntimeError("[/gloo/pair.cc:561] Connection closed by peer [::1]:9. This is typically caused by"))
    'Connection closed by peer [::1]:9.'
    """
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(" This is typically")[0]


def _lives(pid: int) -> bool:
    """Whether a process still runs; a zombie, which has ended, does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return False
    except OSError:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
