"""Recursive halving and doubling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigstep.exchange.collectives.phases import copy_back, fill_up, round_up
from bigstep.exchange.line import Steps, Waitable
from bigstep.exchange.messages import Message, transfer
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Halving"]


class Halving:
    """Recursive halving (reduce-scatter), then recursive doubling (all-gather): 2 log2 N rounds.

    With p the largest power of two up to N, each of the N - p last ranks first gives its values to a partner among the
    first p, and gets the sum from it at the end.

    Reference:
        Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005, section 4;
        Goyal et al., Accurate, Large Minibatch SGD, 2017, section 4.

    Differs from the paper:
        For a number of ranks that is not a power of two, Goyal et al. use binary blocks; folding in the extra ranks is
        simpler and costs the partner n more bytes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = world.new_group(world.everyone())
        self._power = 1 << (world.size.bit_length() - 1)
        self._started = 0

    def start(self, flat: Tensor) -> Steps:
        """2 log2 p rounds, two more if there are extra ranks; messages are matched by tag, not by order."""
        rank, power = self._world.rank, self._power
        tag = self._started % 2**20 * 64
        self._started += 1
        extra = self._world.size - power
        if rank >= power:
            yield self._swap(rank - power, tag, send=flat)
            yield self._swap(rank - power, tag + 1, receive=flat)
            return
        if rank < extra:
            folded = torch.empty_like(flat)
            yield self._swap(rank + power, tag, receive=folded)
            flat += folded
        whole = fill_up(flat, power)
        low, high = 0, whole.numel()
        received = whole.new_empty(high // 2)
        distances: list[int] = []
        distance = power // 2
        while distance:
            middle = (low + high) // 2
            upper = bool(rank & distance)
            kept, given = (middle, high), (low, middle)
            if not upper:
                kept, given = given, kept
            part = received[: middle - low]
            peer = rank ^ distance
            yield self._swap(peer, tag + 2 + len(distances), send=whole[given[0] : given[1]], receive=part)
            low, high = kept
            whole[low:high] += part
            distances.append(distance)
            distance //= 2
        for distance in reversed(distances):
            size = high - low
            other = low - size if rank & distance else high
            peer, turn = rank ^ distance, tag + 32 + distances.index(distance)
            yield self._swap(peer, turn, send=whole[low:high], receive=whole[other : other + size])
            low, high = min(low, other), max(high, other + size)
        copy_back(flat, whole)
        if rank < extra:
            yield self._swap(rank + power, tag + 1, send=flat)

    def bytes_sent(self, flat: Tensor) -> float:
        """What this rank sends: as an extra rank, as the partner of one, or as any other."""
        rank, power, size = self._world.rank, self._power, self._world.size
        if rank >= power:
            return float(flat.nbytes)
        nbytes = round_up(flat.numel(), power) * flat.element_size()
        inside = collective_traffic("halving", nbytes, power).bytes_sent
        return inside + (flat.nbytes if rank < size - power else 0)

    def _swap(
        self, peer: int, tag: int, *, send: Tensor | None = None, receive: Tensor | None = None
    ) -> Sequence[Waitable]:
        """Send to and receive from `peer` at the same time."""
        to = self._world.ranks[peer]
        receives = [] if receive is None else [Message(to, receive)]
        return transfer(receives, [] if send is None else [Message(to, send)], self._group, tag)
