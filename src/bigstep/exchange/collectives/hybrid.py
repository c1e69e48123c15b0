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
    """Hierarchical where rounds cost most, a ring where bytes do; the size of a message decides, on all ranks alike.

    Gradients come packed into buckets, so it is the size of a bucket that counts, as after the paper's fusion.

    Reference:
        Jia et al., Highly Scalable Deep Learning Training System with Mixed-Precision, 2018, section 3.

    Differs from the paper:
        The paper's threshold was not found. A ring takes over where one of its rounds moves 64 KiB
        (`bigstep.tables.collectives.RING_ROUND_BYTES`).
    """

    def __init__(self, world: World) -> None:
        self._size = world.size
        self._ways: dict[str, Ring | Hierarchical] = {"hierarchical": Hierarchical(world), "ring": Ring(world)}

    def start(self, flat: Tensor) -> Steps:
        """Start the chosen collective; each has process groups of its own, so that their operations never mix."""
        return self._way(flat).start(flat)

    def bytes_sent(self, flat: Tensor) -> float:
        """What the chosen collective sends."""
        return self._way(flat).bytes_sent(flat)

    def _way(self, flat: Tensor) -> Ring | Hierarchical:
        return self._ways[choose_by_size(flat.nbytes, self._size)]
