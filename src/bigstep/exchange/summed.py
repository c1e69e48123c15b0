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
        world: The ranks; None for a rank that adds up parts of its own alone, with the same arithmetic.
        collective: How the codes are added; None where there are no other ranks.
        codec: How gradients are written.
        agrees: Whether all parts must agree on the maximum of what the codec measures before they are encoded.
        parts: How many parts the sum has in all, where ranks add several each; the result is then their sum. By
            default each rank adds one, and the result is the mean.
    """

    def __init__(
        self,
        world: World | None,
        collective: Collective | None,
        codec: SummableCodec,
        *,
        agrees: bool = False,
        parts: int = 0,
    ) -> None:
        self._collective, self._codec, self._agrees = collective, codec, agrees
        self._ranks = 1 if world is None else world.size
        self._rule = Sum(parts) if parts else Sum(self._ranks, divide_by=self._ranks)
        self._agreement = world.new_group(world.everyone()) if agrees and world is not None else None
        self.residuals = Residuals(0 if world is None else world.rank, self._ranks)
        self.bytes_sent = 0.0

    def start(self, bucket: Bucket) -> Steps:
        """Agree where the codec asks for it, encode, sum, decode."""
        flat, sizes, agreed = bucket.flat, bucket.sizes, None
        if self._agrees:
            agreed = self._codec.measure(flat, sizes)
            for part in bucket.held:
                agreed = torch.maximum(agreed, self._codec.measure(part, sizes))
        if agreed is not None and self._agreement is not None:
            self.bytes_sent += collective_traffic("ring", agreed.nbytes, self._ranks).bytes_sent
            yield [issue(dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._agreement, async_op=True))]
        wire = self._codec.encode(flat, sizes, agreed, self._rule)
        for part in bucket.held:
            wire += self._codec.encode(part, sizes, agreed, self._rule)
        if self._collective is not None:
            self.bytes_sent += self._collective.bytes_sent(wire)
            yield from self._collective.start(wire)
        self._codec.decode(wire, flat, sizes, agreed, self._rule)
