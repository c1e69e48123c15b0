"""Exact sums of parts: piles of integers, on collectives that add."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs.piles import Piles
from bigstep.exchange.collectives.phases import Collective, issue
from bigstep.exchange.line import Steps
from bigstep.exchange.residuals import Residuals
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Piled", "add_gradients"]


class Piled:
    """Add the last part to the bucket's piles, agree on their levels, sum them on the wire; nothing is carried.

    Args:
        world: The ranks.
        collective: How integers are added.
    """

    def __init__(self, world: World, collective: Collective) -> None:
        self._collective, self._ranks = collective, world.size
        self._agreement = world.new_group(world.everyone())
        self.residuals = Residuals(world.rank, world.size)
        self.bytes_sent = 0.0

    def start(self, bucket: Bucket) -> Steps:
        """Put the sum over all parts of all ranks into the bucket."""
        piles, places, pieces = bucket.piles, bucket.places, bucket.flat.split_with_sizes(bucket.sizes)
        assert piles is not None
        piles.add(pieces, places)
        levels = piles.levels(places)
        self.bytes_sent += collective_traffic("ring", levels.nbytes, self._ranks).bytes_sent
        yield [issue(dist.all_reduce(levels, op=dist.ReduceOp.MAX, group=self._agreement, async_op=True))]
        agreed = levels.cpu()
        wire = piles.gather(agreed, places)
        if wire.numel():
            self.bytes_sent += self._collective.bytes_sent(wire)
            yield from self._collective.start(wire)
        piles.spread(agreed, wire, pieces, places)


def add_gradients(piles: Piles, parameters: Sequence[Tensor], *, clear: bool = False) -> None:
    """Add what lies in `.grad` to the piles of some parameters, as one part; make it 0 if it is to be cleared."""
    held = [place for place, parameter in enumerate(parameters) if parameter.grad is not None]
    if held:
        gradients = [_in_order(parameters[place]) for place in held]
        piles.add(gradients, None if len(held) == len(parameters) else held, clear=clear)


def _in_order(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, its values in the order in which the parameter's lie in memory.

    Autograd and DDP lay gradients out so. One that somebody else has made becomes one that is.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() != parameter.stride():
        gradient = parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
    return gradient
