"""Exact sums of parts: piles of integers, on collectives that add, or in memory that ranks of one host share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs.levels import BROKEN, EMPTY, spans_of
from bigstep.exchange.codecs.piles import Piles
from bigstep.exchange.collectives.phases import Collective, issue
from bigstep.exchange.line import Steps
from bigstep.exchange.residuals import Residuals
from bigstep.exchange.shared import Regions, SharedMemory
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Piled", "add_gradients", "in_order"]

_ROOM = 2
"""Integers per value that the shared memory has room for: some parameters take several pairs of levels, seldom all."""


class Piled:
    """Add the last part to the bucket's piles, agree on their levels, sum them on the wire; nothing is carried.

    Args:
        world: The ranks.
        collective: How integers are added.
        shared: Number of values that ranks of one host may sum through shared memory instead; 0 for none.
    """

    def __init__(self, world: World, collective: Collective, shared: int = 0) -> None:
        self._collective, self._ranks = collective, world.size
        self._agreement = world.new_group(world.everyone())
        # twice, since DDP regroups its buckets after its first backward; what is never written takes no memory
        self._shared = SharedMemory.among(world, 2 * (_ROOM + 2) * shared) if shared else None
        self._written = world.new_group(world.everyone()) if self._shared else self._agreement
        self.residuals = Residuals(world.rank, world.size)
        self.bytes_sent = 0.0
        self._highest = -1, EMPTY  # the step being exchanged, and the highest level of its parts so far

    def start(self, bucket: Bucket) -> Steps:
        """Put the sum over all parts of all ranks into the bucket."""
        piles, places, pieces = bucket.piles, bucket.places, bucket.flat.split_with_sizes(bucket.sizes)
        assert piles is not None
        levels, regions = piles.add_last(pieces, places), self._regions(bucket)
        self.bytes_sent += collective_traffic("ring", levels.nbytes, self._ranks).bytes_sent
        if regions:
            regions.mine[: levels.numel()] = levels
            yield [_tell(self._agreement)]
            agreed = torch.stack([row[: levels.numel()] for row in regions.all]).amax(0).int()
        else:
            yield [issue(dist.all_reduce(levels, op=dist.ReduceOp.MAX, group=self._agreement, async_op=True))]
            agreed = levels.cpu()
        high = self._highest[1] if self._highest[0] == bucket.step else EMPTY
        self._highest = bucket.step, max(int(agreed[::2].max()), high)
        length = int((np.array(bucket.sizes) * spans_of(agreed.numpy())[1]).sum())
        if regions and levels.numel() + length <= regions.mine.numel():
            rows = [row[levels.numel() :] for row in regions.all]
            wire = piles.gather(agreed, places, into=regions.mine[levels.numel() :])
            yield [_tell(self._written)]
        else:
            rows = [wire := piles.gather(agreed, places)]
            yield from self._collective.start(wire) if length else ()
        self.bytes_sent += self._collective.bytes_sent(wire) if length else 0.0
        piles.spread(agreed, rows, pieces, places)

    def highest(self, step: int) -> int:
        """The highest level of a step, if it was the last to be exchanged, with all its buckets; else BROKEN."""
        return self._highest[1] if self._highest[0] == step else BROKEN

    def regroup(self) -> None:
        """Prepare for other buckets."""
        if self._shared is not None:
            self._shared.regroup()

    def _regions(self, bucket: Bucket) -> Regions | None:
        """Where ranks of one host write a bucket's levels and integers.

        No rank still reads what is overwritten: all have read a step's levels once all have written its integers, and
        all have read its integers once all have written the next step's levels.
        """
        if self._shared is None:
            return None
        return self._shared.regions(bucket.places, 2 * len(bucket.places) + _ROOM * bucket.flat.numel())


def _tell(group: dist.ProcessGroup) -> dist.Work:
    """Start a barrier; of all Gloo collectives, this one takes the fewest messages."""
    return issue(dist.all_reduce(torch.zeros(1, dtype=torch.int32), group=group, async_op=True))


def add_gradients(piles: Piles, parameters: Sequence[Tensor]) -> None:
    """Add the gradients in `.grad` to the piles of some parameters, as one part, and set `.grad` to None.

    Then the next backward can make its own tensor `.grad`; if that held zeros, it would have to add to them.
    """
    held = [place for place, parameter in enumerate(parameters) if parameter.grad is not None]
    if held:
        gradients = [in_order(parameters[place]) for place in held]
        piles.hold(gradients, None if len(held) == len(parameters) else held)
        for place in held:
            parameters[place].grad = None


def in_order(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, with the parameter's memory layout.

    Autograd and DDP lay gradients out this way; one that came from elsewhere is replaced by a copy that does.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() != parameter.stride():
        gradient = parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
    return gradient
