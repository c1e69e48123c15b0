"""Exact sums of parts: piles of integers, on collectives that add."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs.piles import add_parts, find_levels, pairs_of
from bigstep.exchange.collectives.phases import Collective, issue
from bigstep.exchange.line import Steps
from bigstep.exchange.residuals import Residuals
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Piled"]


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
        sizes, piles = bucket.sizes, bucket.piles
        pieces = bucket.flat.split_with_sizes(sizes)
        add_parts(piles, pieces)
        levels = find_levels(piles, bucket.flat.device)
        self.bytes_sent += collective_traffic("ring", levels.nbytes, self._ranks).bytes_sent
        yield [issue(dist.all_reduce(levels, op=dist.ReduceOp.MAX, group=self._agreement, async_op=True))]
        agreed = [(high, -minus_low) for high, minus_low in levels.view(-1, 2).tolist()]
        lengths = [size * pairs_of(*span) for size, span in zip(sizes, agreed, strict=True)]
        wire = torch.empty(sum(lengths), dtype=torch.int64, device=bucket.flat.device)
        rows = wire.split_with_sizes(lengths)
        for pile, span, row in zip(piles, agreed, rows, strict=True):
            pile.gather(*span, row)
        if wire.numel():
            self.bytes_sent += self._collective.bytes_sent(wire)
            yield from self._collective.start(wire)
        for pile, span, row, piece in zip(piles, agreed, rows, pieces, strict=True):
            pile.spread(*span, row, piece)
