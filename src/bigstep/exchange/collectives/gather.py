"""An owner for each block: codes travel whole, once to their owners and once from them to all."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bigstep.exchange.collectives.phases import all_gather, all_to_all
from bigstep.exchange.line import Waitable
from bigstep.exchange.world import World

__all__ = ["Gather"]


class Gather:
    """Two rounds in which nothing is added on the way, so that codes of any kind can travel.

    The cost does not depend on the number of ranks: a rank sends its codes once to their owners, and its own blocks'
    results once to all.

    Reference:
        Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs, Interspeech 2014, section 3.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._to_owners = world.new_group(world.everyone())
        self._to_all = world.new_group(world.everyone())
        self._turns = 0

    def next_turn(self) -> int:
        """A number that tells the exchanges in flight apart, the same on all ranks."""
        self._turns += 1
        return self._turns

    def send_to_owners(self, received: Tensor, messages: Tensor, turn: int) -> Sequence[Waitable]:
        """Start sending the k-th of N equally long messages to rank k; `received` gets all ranks' for this one."""
        return all_to_all(received, messages, self._world, self._world.everyone(), self._to_owners, turn)

    def send_to_all(self, received: Tensor, message: Tensor, turn: int) -> Sequence[Waitable]:
        """Start sending one message to all ranks; `received` gets all N of them, in rank order."""
        return all_gather(received, message, self._world, self._world.everyone(), self._to_all, turn)

    def bytes_sent(self, message: Tensor) -> float:
        """What this rank sends in both rounds if every message is as long as this one."""
        return 2.0 * (self._world.size - 1) * message.nbytes
