"""Ways of summing a tensor over all ranks, in steps that `bigstep.exchange.line` can interleave.

Each class makes its process groups once (every rank must construct it, in the same order relative to other groups) and
then `start`s sums: an iterator that yields the operations it has just issued and wants waited for. Phases have groups
of their own, for the reason given in `bigstep.exchange.line`. All sums are in place, work for any length and any
floating type, and leave the same bits on every rank: each element is summed by one rank, in one order, and copied from
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.line import Steps, Waitable
from bigstep.exchange.post import Letter, post
from bigstep.exchange.world import World
from bigstep.tables.collectives import collective_traffic

__all__ = ["Collective", "Halving", "Hierarchical", "Ring", "Torus", "all_gather", "all_to_all", "sum_over_ranks"]

# all_gather_into_tensor was renamed; releases before that know only the old name, later ones warn about it
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collective(Protocol):
    """A way of summing over ranks."""

    def start(self, flat: Tensor) -> Steps:
        """Sum the contiguous, one-dimensional `flat` over all ranks, in place."""

    def bytes_sent(self, flat: Tensor) -> float:
        """What this rank sends for `flat`, filled-up parts included."""


def sum_over_ranks(collective: Collective, tensor: Tensor) -> None:
    """Sum any tensor over all ranks in place and wait for it: contiguous or not, empty or not.

    Hazard: every rank must call this, with a tensor of the same size.
    """
    flat = tensor.contiguous().view(-1)
    for under_way in collective.start(flat):
        for work in under_way:
            work.wait()
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


class Ring:
    """The backend's own all-reduce: a ring with Gloo, whatever NCCL finds best with NCCL."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = world.new_group(world.everyone())

    def start(self, flat: Tensor) -> Steps:
        """One phase."""
        yield [_issue(dist.all_reduce(flat, group=self._group, async_op=True))]

    def bytes_sent(self, flat: Tensor) -> float:
        """A ring's bytes."""
        return collective_traffic("ring", flat.nbytes, self._world.size).bytes_sent


class Torus:
    """Reduce-scatter along X, all-reduce of that 1/X along Y, all-gather along X.

    Only Y crosses the slow links when rows lie inside nodes, with 1/X of the data from each rank.

    Reference:
        Mikami et al., Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash, 2018, section 3.

    Differs from the paper:
        The reduce-scatter is one round of pieces straight to their owners, who add them in the order of ranks (and for
        half precision in float32), instead of X - 1 rounds; the bytes are the same. Gloo's own reduce-scatter moves
        the bytes of a whole all-reduce.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._started = 0
        self._scatter = world.new_group(world.row())
        self._vertical = world.new_group(world.column())
        self._gather = world.new_group(world.row())

    def start(self, flat: Tensor) -> Steps:
        """Three phases; those along an axis of one rank are left out."""
        X, Y = self._world.grid
        pieces = _filled_up(flat, X)
        if X > 1:
            received = torch.empty_like(pieces)
            self._started += 1
            turn, row = self._started, self._world.row()  # other buckets start before this one's last phase
            yield all_to_all(received, pieces, self._world, row, self._scatter, turn)
            mine = received.view(X, -1).sum(0)
        else:
            mine = pieces
        if Y > 1:
            yield [_issue(dist.all_reduce(mine, group=self._vertical, async_op=True))]
        if X > 1:
            yield all_gather(pieces, mine, self._world, row, self._gather, turn)
            _copy_back(flat, pieces)

    def bytes_sent(self, flat: Tensor) -> float:
        """Those of a ring, on the length filled up to a multiple of X."""
        X, _ = self._world.grid
        nbytes = _rounded_up(flat.numel(), X) * flat.element_size()
        return collective_traffic("torus", nbytes, self._world.size, grid=self._world.grid).bytes_sent


class Hierarchical:
    """Reduce to the node's leader, all-reduce among leaders, broadcast in the node (as scatter and all-gather).

    Reference:
        Goyal et al., Accurate, Large Minibatch SGD, 2017, section 4; Jia et al., Highly Scalable Deep Learning Training
        System with Mixed-Precision, 2018, section 3.
    """

    def __init__(self, world: World) -> None:
        collective_traffic("hierarchical", 0, world.size, group=world.ranks_per_node)  # refuses uneven nodes
        self._world = world
        self._node = world.node()
        self._leads = world.rank == self._node[0]
        self._started = 0
        self._nodes = world.size // len(self._node)
        self._reduce = world.new_group(self._node)
        self._between = world.new_group(world.peers())  # members make one too, and leave it idle: see World.new_group
        self._scatter = world.new_group(self._node)
        self._gather = world.new_group(self._node)

    def start(self, flat: Tensor) -> Steps:
        """Four phases; members of a node skip the leaders' one."""
        leader = self._world.ranks[self._node[0]]
        inside = len(self._node) > 1
        self._started += 1
        turn = self._started
        if inside:
            yield [_issue(dist.reduce(flat, dst=leader, group=self._reduce, async_op=True))]
        if self._leads and self._nodes > 1:
            yield [_issue(dist.all_reduce(flat, group=self._between, async_op=True))]
        if inside and flat.numel():
            whole = _filled_up(flat, len(self._node))
            mine = whole.new_empty(whole.numel() // len(self._node))
            pieces = list(whole.chunk(len(self._node))) if self._leads else None
            yield [_issue(dist.scatter(mine, pieces, src=leader, group=self._scatter, async_op=True))]
            yield all_gather(whole, mine, self._world, self._node, self._gather, turn)
            _copy_back(flat, whole)

    def bytes_sent(self, flat: Tensor) -> float:
        """A leader's or a member's."""
        group = len(self._node)
        nbytes = _rounded_up(flat.numel(), group) * flat.element_size()
        role: Literal["leader", "member"] = "leader" if self._leads else "member"
        return collective_traffic("hierarchical", nbytes, self._world.size, group=group, role=role).bytes_sent


class Halving:
    """Recursive halving (reduce-scatter), then recursive doubling (all-gather): 2 log2 N rounds.

    With p the largest power of two up to N, each of the N - p last ranks first gives its values to a partner among the
    first p, and gets the sum from it at the end.

    Reference:
        Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005, section 4;
        Goyal et al., Accurate, Large Minibatch SGD, 2017, section 4.

    Differs from the paper:
        Goyal et al. fold sizes that are no power of two in binary blocks; folding in the extra ranks is simpler and
        costs the partner n more bytes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = world.new_group(world.everyone())
        self._power = 1 << (world.size.bit_length() - 1)
        self._started = 0

    def start(self, flat: Tensor) -> Steps:
        """2 log2 p rounds, two more with extra ranks; messages are told apart by tag, not by order."""
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
        whole = _filled_up(flat, power)
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
        _copy_back(flat, whole)
        if rank < extra:
            yield self._swap(rank + power, tag + 1, send=flat)

    def bytes_sent(self, flat: Tensor) -> float:
        """A partner's, an extra rank's, or a plain member's of the power of two."""
        rank, power, size = self._world.rank, self._power, self._world.size
        if rank >= power:
            return float(flat.nbytes)
        nbytes = _rounded_up(flat.numel(), power) * flat.element_size()
        inside = collective_traffic("halving", nbytes, power).bytes_sent
        return inside + (flat.nbytes if rank < size - power else 0)

    def _swap(
        self, peer: int, tag: int, *, send: Tensor | None = None, receive: Tensor | None = None
    ) -> Sequence[Waitable]:
        """Send to and receive from `peer` at the same time."""
        to = self._world.ranks[peer]
        receives = [] if receive is None else [Letter(to, receive)]
        return post(receives, [] if send is None else [Letter(to, send)], self._group, tag)


def all_to_all(
    received: Tensor, pieces: Tensor, world: World, members: list[int], group: dist.ProcessGroup, tag: int
) -> Sequence[Waitable]:
    """Start sending the k-th piece to the k-th member, and filling `received` with everybody's piece for this rank.

    `tag` tells exchanges in flight apart and must be the same on all members.
    """
    if dist.get_backend(group) != "gloo":
        return [_issue(dist.all_to_all_single(received, pieces, group=group, async_op=True))]
    count = len(members)
    return _trade(received.view(count, -1), list(pieces.view(count, -1)), world, members, group, tag)


def all_gather(
    whole: Tensor, mine: Tensor, world: World, members: list[int], group: dist.ProcessGroup, tag: int
) -> Sequence[Waitable]:
    """Start filling `whole` with every member's `mine`, in their order; `tag` as in `all_to_all`."""
    if dist.get_backend(group) != "gloo":
        return [_issue(_all_gather_flat(whole, mine, group=group, async_op=True))]
    count = len(members)
    return _trade(whole.view(count, -1), [mine] * count, world, members, group, tag)


def _trade(
    inbox: Tensor, outbox: list[Tensor], world: World, members: list[int], group: dist.ProcessGroup, tag: int
) -> Sequence[Waitable]:
    """Send outbox[k] to the k-th member and receive inbox[k] from it, with everybody at once.

    Gloo's own all-to-all and all-gather do not post every receive first, as `post` does: two ranks then take turns for
    as long as a socket's buffer needs to drain (measured on two ranks at 50 Mbit/s: up to 1.4 times slower).
    """
    count, mine = len(members), members.index(world.rank)
    inbox[mine].copy_(outbox[mine])
    if count == 1 or not inbox[mine].numel():
        return []
    others = [(mine + distance) % count for distance in range(1, count)]
    receives = [Letter(world.ranks[members[k]], inbox[k]) for k in reversed(others)]
    sends = [Letter(world.ranks[members[k]], outbox[k]) for k in others]
    return post(receives, sends, group, tag % 2**20)


def _issue(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def _rounded_up(length: int, parts: int) -> int:
    return -(-length // parts) * parts


def _filled_up(flat: Tensor, parts: int) -> Tensor:
    """`flat` itself where its length divides by `parts`, else a copy with zeros behind it."""
    missing = _rounded_up(flat.numel(), parts) - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def _copy_back(flat: Tensor, filled_up: Tensor) -> None:
    if filled_up.data_ptr() != flat.data_ptr():
        flat.copy_(filled_up[: flat.numel()])
