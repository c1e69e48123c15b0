"""Messages between pairs of ranks, several at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange.line import Waitable

__all__ = ["Message", "is_gloo", "issue", "transfer"]


class Message(NamedTuple):
    """A tensor for, or from, another rank of the default group."""

    peer: int
    tensor: Tensor


class _HostTransfer:
    """Messages under way between host copies of GPU tensors; `wait` copies what has arrived to the GPU."""

    def __init__(self, under_way: Sequence[Waitable], arrivals: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._under_way, self._arrivals = under_way, arrivals

    def wait(self) -> None:
        """Return when all have arrived; the copies to the GPU are queued on the current stream."""
        for work in self._under_way:
            work.wait()
        for place, copy in self._arrivals:
            place.copy_(copy)


class _InTurns:
    """Receives that are all posted at once, and sends that start one at a time, each when a receive has ended.

    Hazard: all sends but the first start inside `wait`, so it must be called.
    """

    def __init__(self, receives: Sequence[Waitable], sends: Sequence[Callable[[], Waitable]]) -> None:
        self._receives, self._sends = list(receives), list(sends)
        self._leaving = [self._sends.pop(0)()] if self._sends else []

    def wait(self) -> None:
        """Return when all have ended."""
        while self._receives or self._sends:
            if self._receives:
                self._receives.pop(0).wait()
            if self._sends:
                self._leaving.append(self._sends.pop(0)())
        for work in self._leaving:
            work.wait()


def transfer(
    receives: Sequence[Message],
    sends: Sequence[Message],
    group: dist.ProcessGroup,
    tag: int,
    *,
    in_turns: bool = False,
) -> Sequence[Waitable]:
    """Start these messages and return what to wait for; empty tensors are not sent.

    `in_turns`: the first message leaves at once, the second when the first of `receives` has ended, and so on, so that
    ranks whose orders match never send to the same rank at the same time.

    Every receive is posted before the first send: Gloo tells a peer that it may send over the same connection that
    carries our own data, and behind that data the notice would come too late; the two directions would then take turns
    (measured: 1.8 times slower). Gloo cannot send from GPU memory (ranks that share a GPU use Gloo), so such messages
    go through the host.
    """
    receives = [message for message in receives if message.tensor.numel()]
    sends = [message for message in sends if message.tensor.numel()]
    if not receives and not sends:
        return []
    sample = (*receives, *sends)[0].tensor
    if sample.is_cuda and is_gloo(group, sample):
        arrivals = [(message.tensor, torch.empty_like(message.tensor, device="cpu")) for message in receives]
        landing = [Message(message.peer, copy) for message, (_, copy) in zip(receives, arrivals, strict=True)]
        leaving = [Message(message.peer, message.tensor.cpu()) for message in sends]
        return [_HostTransfer(transfer(landing, leaving, group, tag, in_turns=in_turns), arrivals)]
    if in_turns:
        under_way = [issue(dist.irecv(message.tensor, message.peer, group, tag)) for message in receives]
        return [_InTurns(under_way, [functools.partial(_send, message, group, tag) for message in sends])]
    operations = [dist.P2POp(dist.irecv, message.tensor, message.peer, group, tag) for message in receives]
    operations += [dist.P2POp(dist.isend, message.tensor, message.peer, group, tag) for message in sends]
    return dist.batch_isend_irecv(operations)


def _send(message: Message, group: dist.ProcessGroup, tag: int) -> Waitable:
    return issue(dist.isend(message.tensor, message.peer, group, tag))


def is_gloo(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Whether Gloo carries a tensor in this group, which may have another backend for each kind of device."""
    return f"{tensor.device.type}:gloo" in dist.get_backend_config(group).split(",")


def issue(work: dist.Work | None) -> dist.Work:
    """The operation that was just started; this rank must be in its group."""
    assert work is not None, "this rank is not in the group"
    return work
