"""Messages between pairs of ranks, several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.line import Waitable

__all__ = ["Letter", "post"]


class Letter(NamedTuple):
    """A tensor for, or from, another rank of the default group."""

    peer: int
    tensor: Tensor


class _Landing:
    """Messages under way between host copies of tensors on a GPU; waiting brings what came in to its place."""

    def __init__(self, under_way: Sequence[Waitable], arrivals: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._under_way, self._arrivals = under_way, arrivals

    def wait(self) -> None:
        """Return when all have arrived; the copies go with the current stream."""
        for work in self._under_way:
            work.wait()
        for place, copy in self._arrivals:
            place.copy_(copy)


def post(receives: Sequence[Letter], sends: Sequence[Letter], group: dist.ProcessGroup, tag: int) -> Sequence[Waitable]:
    """Start these messages and return what to wait for; empty tensors are not sent.

    Every receive is posted before the first send: Gloo tells a peer that it may send in the same stream that carries
    our own data, and behind that data the word would come too late; both directions would then take turns (measured:
    1.8 times slower). Gloo carries no messages from the memory of a GPU (ranks that share one use Gloo), so those go by
    way of the host.
    """
    receives = [letter for letter in receives if letter.tensor.numel()]
    sends = [letter for letter in sends if letter.tensor.numel()]
    if not receives and not sends:
        return []
    if any(letter.tensor.is_cuda for letter in (*receives, *sends)) and dist.get_backend(group) == "gloo":
        arrivals = [(letter.tensor, torch.empty_like(letter.tensor, device="cpu")) for letter in receives]
        landed = [Letter(letter.peer, copy) for letter, (_, copy) in zip(receives, arrivals, strict=True)]
        copied = [Letter(letter.peer, letter.tensor.cpu()) for letter in sends]
        return [_Landing(post(landed, copied, group, tag), arrivals)]
    operations = [dist.P2POp(dist.irecv, letter.tensor, letter.peer, group, tag) for letter in receives]
    operations += [dist.P2POp(dist.isend, letter.tensor, letter.peer, group, tag) for letter in sends]
    return dist.batch_isend_irecv(operations)
