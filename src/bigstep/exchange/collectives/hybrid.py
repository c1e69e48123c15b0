"""Small messages by way of the nodes' leaders, large ones around a ring."""

from __future__ import annotations

from torch import Tensor

from bigstep.exchange.collectives.hierarchical import Hierarchical
from bigstep.exchange.collectives.ring import Ring
from bigstep.exchange.line import Steps
from bigstep.exchange.world import World
from bigstep.tables.collectives import choose_by_size

__all__ = ["Hybrid"]


class Hybrid:
    """Hierarchical where rounds are dear, a ring where bytes are; the size of a message decides, alike on all ranks.

    Small gradients come packed into buckets, so that what is small here is a bucket, as after the paper's fusion.

    Reference:
        Jia et al., Highly Scalable Deep Learning Training System with Mixed-Precision, 2018, section 3.

    Differs from the paper:
        Its threshold was not found. A ring takes over where one of its rounds moves 64 KiB
        (`bigstep.tables.collectives.RING_ROUND_BYTES`).
    """

    def __init__(self, world: World) -> None:
        self._size = world.size
        self._ways: dict[str, Ring | Hierarchical] = {"hierarchical": Hierarchical(world), "ring": Ring(world)}

    def start(self, flat: Tensor) -> Steps:
        """Those of the way that is taken; each has process groups of its own, so that they never mix."""
        return self._way(flat).start(flat)

    def bytes_sent(self, flat: Tensor) -> float:
        """Those of the way that is taken."""
        return self._way(flat).bytes_sent(flat)

    def _way(self, flat: Tensor) -> Ring | Hierarchical:
        return self._ways[choose_by_size(flat.nbytes, self._size)]
