"""Codes that can be added, on collectives that add."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs import Sum, SummableCodec
from bigstep.exchange.collectives.phases import Collective, issue
from bigstep.exchange.line import Steps
from bigstep.exchange.residuals import Residuals
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Summed"]

_SMALL = 65_536
"""Up to this many values, a call for each part costs more than copying the parts into one tensor."""


class Summed:
    """Encode, sum on the wire, decode: any summable codec on any summing collective; nothing is carried.

    Args:
        world: The ranks; None for a single rank that adds up its own parts, with the same arithmetic.
        collective: How the codes are added; None if there are no other ranks.
        codec: How gradients are written.
        agrees: Whether all parts must agree on the maximum of what the codec measures before they are encoded.
        parts: Total number of parts of the sum, if ranks add several each; the result is then their sum. By default
            each rank adds one, and the result is the mean.
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
        # one call for many small parts; but without agreement the code may be the bucket itself, summed in place
        parts = _join([flat, *bucket.held]) if self._agrees else [(part, 1) for part in (flat, *bucket.held)]
        if self._agrees:
            found = [self._codec.measure(part, sizes * count) for part, count in parts]
            agreed = torch.cat([each.view(count, -1) for each, (_, count) in zip(found, parts, strict=True)]).amax(0)
        if agreed is not None and self._agreement is not None:
            self.bytes_sent += collective_traffic("ring", agreed.nbytes, self._ranks).bytes_sent
            yield [issue(dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._agreement, async_op=True))]
        wire: Tensor | None = None
        for part, count in parts:
            scales = agreed if agreed is None or count == 1 else agreed.repeat(count)
            code = self._codec.encode(part, sizes * count, scales, self._rule)
            code = code if count == 1 else code.view(count, -1).sum(0)
            wire = code if wire is None else wire.add_(code)
        assert wire is not None
        if self._collective is not None:
            self.bytes_sent += self._collective.bytes_sent(wire)
            yield from self._collective.start(wire)
        self._codec.decode(wire, flat, sizes, agreed, self._rule)


def _join(parts: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Concatenate small parts, leave large ones as they are; return tensors, and how many parts each holds."""
    if len(parts) == 1 or parts[0].numel() > _SMALL:
        return [(part, 1) for part in parts]
    return [(torch.cat(list(parts)), len(parts))]
