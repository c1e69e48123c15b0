"""The backend's own all-reduce."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.collectives.phases import issue
from bigstep.exchange.line import Steps
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Ring"]


class Ring:
    """The backend's own all-reduce: a ring with Gloo, the algorithm of NCCL's choice with NCCL."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = world.new_group(world.everyone())

    def start(self, flat: Tensor) -> Steps:
        """One phase."""
        yield [issue(dist.all_reduce(flat, group=self._group, async_op=True))]

    def bytes_sent(self, flat: Tensor) -> float:
        """What a rank of a ring sends."""
        return collective_traffic("ring", flat.nbytes, self._world.size).bytes_sent
