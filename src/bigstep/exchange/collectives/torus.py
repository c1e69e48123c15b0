"""The two-dimensional torus: along rows, along columns, along rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.collectives.phases import all_gather, all_to_all, copy_back, fill_up, issue, round_up
from bigstep.exchange.line import Steps
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Torus"]


class Torus:
    """Reduce-scatter along X, all-reduce of that 1/X along Y, all-gather along X.

    When rows lie inside nodes, only the phase along Y crosses the slow links, with 1/X of the data from each rank.

    Reference:
        Mikami et al., Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash, 2018, section 3.

    Differs from the paper:
        The reduce-scatter is one round of pieces straight to their owners, who add them in the order of ranks (and for
        half precision in float32), instead of X - 1 rounds; the bytes are the same. Gloo's own reduce-scatter moves
        the bytes of a whole all-reduce.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._started = 0
        self._scatter = world.new_group(world.row())
        self._vertical = world.new_group(world.column())
        self._gather = world.new_group(world.row())

    def start(self, flat: Tensor) -> Steps:
        """Three phases; those along an axis of length 1 are left out."""
        X, Y = self._world.grid
        pieces = fill_up(flat, X)
        if X > 1:
            received = torch.empty_like(pieces)
            self._started += 1
            turn, row = self._started, self._world.row()  # kept: other buckets start before the last phase
            yield all_to_all(received, pieces, self._world, row, self._scatter, turn)
            mine = received.view(X, -1).sum(0)
        else:
            mine = pieces
        if Y > 1:
            yield [issue(dist.all_reduce(mine, group=self._vertical, async_op=True))]
        if X > 1:
            yield all_gather(pieces, mine, self._world, row, self._gather, turn)
            copy_back(flat, pieces)

    def bytes_sent(self, flat: Tensor) -> float:
        """As many bytes as in a ring, for the length padded to a multiple of X."""
        X, _ = self._world.grid
        nbytes = round_up(flat.numel(), X) * flat.element_size()
        return collective_traffic("torus", nbytes, self._world.size, grid=self._world.grid).bytes_sent
