"""Nodes first, then their leaders."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.collectives.phases import all_gather, copy_back, fill_up, issue, round_up
from bigstep.exchange.line import Steps
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Hierarchical"]


class Hierarchical:
    """Reduce to the node's leader, all-reduce among leaders, broadcast in the node (as scatter and all-gather).

    Reference:
        Goyal et al., Accurate, Large Minibatch SGD, 2017, section 4; Jia et al., Highly Scalable Deep Learning Training
        System with Mixed-Precision, 2018, section 3.
    """

    def __init__(self, world: World) -> None:
        collective_traffic("hierarchical", 0, world.size, group=world.ranks_per_node)  # refuses uneven nodes
        self._world = world
        self._node = world.node()
        self._leads = world.rank == self._node[0]
        self._started = 0
        self._nodes = world.size // len(self._node)
        self._reduce = world.new_group(self._node)
        self._between = world.new_group(world.peers())  # members make one too, and leave it idle: see World.new_group
        self._scatter = world.new_group(self._node)
        self._gather = world.new_group(self._node)

    def start(self, flat: Tensor) -> Steps:
        """Four phases; members that are not leaders skip the one between leaders."""
        leader = self._world.ranks[self._node[0]]
        inside = len(self._node) > 1
        self._started += 1
        turn = self._started
        if inside:
            yield [issue(dist.reduce(flat, dst=leader, group=self._reduce, async_op=True))]
        if self._leads and self._nodes > 1:
            yield [issue(dist.all_reduce(flat, group=self._between, async_op=True))]
        if inside and flat.numel():
            whole = fill_up(flat, len(self._node))
            mine = whole.new_empty(whole.numel() // len(self._node))
            pieces = list(whole.chunk(len(self._node))) if self._leads else None
            yield [issue(dist.scatter(mine, pieces, src=leader, group=self._scatter, async_op=True))]
            yield all_gather(whole, mine, self._world, self._node, self._gather, turn)
            copy_back(flat, whole)

    def bytes_sent(self, flat: Tensor) -> float:
        """What this rank sends, as a leader or as a member."""
        group = len(self._node)
        nbytes = round_up(flat.numel(), group) * flat.element_size()
        role: Literal["leader", "member"] = "leader" if self._leads else "member"
        return collective_traffic("hierarchical", nbytes, self._world.size, group=group, role=role).bytes_sent
