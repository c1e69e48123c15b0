"""What collectives are made of: phases over process groups, and the messages within them.

A collective makes its process groups once (every rank must construct it, in the same order relative to other groups).
`start` then begins a sum: an iterator that yields the operations it has just issued, to be waited for before its next
step. Phases have groups of their own, for the reason given in `bigstep.exchange.line`. All sums are in place, work for
any length and any floating type, and leave the same bits on every rank: each element is summed by one rank, in one
order, and copied from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.line import Steps, Waitable
from bigstep.exchange.messages import Message, is_gloo, issue, transfer
from bigstep.exchange.world import World

__all__ = ["Collective", "all_gather", "all_to_all", "copy_back", "fill_up", "issue", "round_up", "sum_over_ranks"]

# all_gather_into_tensor was renamed; releases before that know only the old name, later ones warn about it
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_AT_ONCE = 32 * 1024
"""Bytes of the longest message that leaves for all ranks at once; longer ones leave in turns.

Several messages as short as this fit into the queue of a slow link, so turns would only delay them: each begins when a
message has come in. Longer ones are through 1.1 to 1.8 times as fast in turns at 10 to 200 Mbit/s. From 1 Gbit/s on
both ways are level, since there a message takes no longer than such a delay (at 10 Gbit/s this many bytes take 26 us).
Measured with 40 to 240 kB on four hosts: benchmarks/exchange/results/turns.md.
"""


class Collective(Protocol):
    """A way of summing over ranks."""

    def start(self, flat: Tensor) -> Steps:
        """Sum the contiguous, one-dimensional `flat` over all ranks, in place."""

    def bytes_sent(self, flat: Tensor) -> float:
        """What this rank sends for `flat`, padding included."""


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


def all_to_all(
    received: Tensor, pieces: Tensor, world: World, members: list[int], group: dist.ProcessGroup, tag: int
) -> Sequence[Waitable]:
    """Start sending the k-th piece to the k-th member, and filling `received` with all members' pieces for this rank.

    `tag` tells exchanges in flight apart and must be the same on all members.
    """
    if not is_gloo(group, pieces):
        return [issue(dist.all_to_all_single(received, pieces, group=group, async_op=True))]
    count = len(members)
    return _trade(received.view(count, -1), list(pieces.view(count, -1)), world, members, group, tag)


def all_gather(
    whole: Tensor, mine: Tensor, world: World, members: list[int], group: dist.ProcessGroup, tag: int
) -> Sequence[Waitable]:
    """Start filling `whole` with every member's `mine`, in their order; `tag` as in `all_to_all`."""
    if not is_gloo(group, mine):
        return [issue(_all_gather_flat(whole, mine, group=group, async_op=True))]
    count = len(members)
    return _trade(whole.view(count, -1), [mine] * count, world, members, group, tag)


def _trade(
    inbox: Tensor, outbox: list[Tensor], world: World, members: list[int], group: dist.ProcessGroup, tag: int
) -> Sequence[Waitable]:
    """Send outbox[k] to the k-th member and receive inbox[k] from it: short messages at once, long ones in turns.

    In the d-th turn each rank sends to the member d places on, so that one message at a time crosses each link: several
    that arrive at once overflow the queue of a slow one, and TCP then waits for a fifth of a second.

    Gloo's own all-to-all and all-gather do not post every receive first, as `transfer` does: two ranks then take turns
    for as long as a socket's buffer needs to drain (measured on two ranks at 50 Mbit/s: up to 1.4 times slower).
    """
    count, mine = len(members), members.index(world.rank)
    inbox[mine].copy_(outbox[mine])
    if count == 1 or not inbox[mine].numel():
        return []
    others = [(mine + distance) % count for distance in range(1, count)]
    receives = [Message(world.ranks[members[k]], inbox[k]) for k in reversed(others)]
    sends = [Message(world.ranks[members[k]], outbox[k]) for k in others]
    return transfer(receives, sends, group, tag % 2**20, in_turns=inbox[mine].nbytes > _AT_ONCE)


def round_up(length: int, parts: int) -> int:
    """The smallest multiple of `parts` that is not below `length`."""
    return -(-length // parts) * parts


def fill_up(flat: Tensor, parts: int) -> Tensor:
    """`flat` itself if its length is a multiple of `parts`, else a copy padded with zeros."""
    missing = round_up(flat.numel(), parts) - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


def copy_back(flat: Tensor, filled_up: Tensor) -> None:
    """Copy the values back into `flat`, if `fill_up` made a copy."""
    if filled_up.data_ptr() != flat.data_ptr():
        flat.copy_(filled_up[: flat.numel()])
