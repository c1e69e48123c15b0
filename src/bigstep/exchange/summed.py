"""Codes that can be added, on collectives that add."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs import Sum, SummableCodec
from bigstep.exchange.collectives.phases import Collective, issue
from bigstep.exchange.line import Steps
from bigstep.exchange.residuals import Residuals
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Summed"]


class Summed:
    """Encode, sum on the wire, decode: any summable codec on any summing collective; nothing is carried.

    Args:
        world: The ranks.
        collective: How the codes are added.
        codec: How gradients are written.
        agrees: Whether ranks must agree on the maximum of what the codec measures before they encode.
        parts: How many parts the sum has in all, where ranks add several each; the result is then their sum. By
            default each rank adds one, and the result is the mean.
    """

    def __init__(
        self, world: World, collective: Collective, codec: SummableCodec, *, agrees: bool = False, parts: int = 0
    ) -> None:
        self._world, self._collective, self._codec = world, collective, codec
        self._rule = Sum(parts) if parts else Sum(world.size, divide_by=world.size)
        self._agreement = world.new_group(world.everyone()) if agrees else None
        self.residuals = Residuals(world.rank, world.size)
        self.bytes_sent = 0.0

    def start(self, bucket: Bucket) -> Steps:
        """Agree where the codec asks for it, encode, sum, decode."""
        flat, sizes, agreed = bucket.flat, bucket.sizes, None
        if self._agreement is not None:
            agreed = self._codec.measure(flat, sizes)
            for part in bucket.held:
                agreed = torch.maximum(agreed, self._codec.measure(part, sizes))
            self.bytes_sent += collective_traffic("ring", agreed.nbytes, self._world.size).bytes_sent
            yield [issue(dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._agreement, async_op=True))]
        wire = self._codec.encode(flat, sizes, agreed, self._rule)
        for part in bucket.held:
            wire += self._codec.encode(part, sizes, agreed, self._rule)
        self.bytes_sent += self._collective.bytes_sent(wire)
        yield from self._collective.start(wire)
        self._codec.decode(wire, flat, sizes, agreed, self._rule)
