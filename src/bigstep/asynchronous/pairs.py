"""Process groups of two: the line between one replica and one shard, and how it is repaired.

Each pair is a Gloo group of its own, so that whoever joins, leaves or dies touches nobody else's. To call a shard, a
replica takes the next number of that shard's calls and both build the group under that number; the shard answers every
call in a thread of its own.

On the wire, per exchange: a call of 7 float64 (what is wanted, and the facts of a push); the pushed vector, if one is,
in chunks; the weights, if they are wanted, in chunks, each as soon as it is up to date; a reply of 3 float64.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.asynchronous.mail import LOOK_S, Store, connect_store, split_address
from bigstep.asynchronous.shard import Push, Receipt
from bigstep.errors import RunError

__all__ = ["FETCH", "LEAVE", "PUSH", "PUT", "SHARD_SIDE", "Call", "Link", "Pair", "pair_group"]

PUSH, FETCH, PUT, LEAVE = 1, 2, 4, 8
"""What a call asks for; push and fetch may come together."""

SHARD_SIDE, REPLICA_SIDE = 0, 1
"""Ranks within a pair."""

CALL_WORDS, REPLY_WORDS = 7, 3

CONNECT_S = 20.0
"""How long one attempt to build a pair may take."""

REPLY_S = 120.0
"""How long a shard may take to reply before the line counts as broken."""

PATIENCE_S = 300.0
"""How long a replica waits for a shard that is being restarted."""


class Pair(Protocol):
    """What is used of a process group of two; both methods return at once with a Work to wait for."""

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> Any:
        """Start sending."""

    def recv(self, tensors: list[Tensor], sender: int, tag: int, /) -> Any:
        """Start receiving."""


@dataclass(frozen=True)
class Call:
    """What a replica asks of a shard; `push` comes with PUSH."""

    wants: int
    push: Push = Push(replica=-1, sequence=0, read_at=0, lr=0.0, steps=0, samples=0)  # noqa: RUF009 - frozen

    def encode(self) -> Tensor:
        """Write as float64, which holds whole numbers up to 2^53."""
        push = self.push
        words = (self.wants, push.replica, push.sequence, push.read_at, push.lr, push.steps, push.samples)
        return torch.tensor(words, dtype=torch.float64)

    @classmethod
    def decode(cls, words: Tensor) -> Call:
        """Read what `encode` wrote.

        >>> call = Call(PUSH | FETCH, Push(replica=1, sequence=2, read_at=3, lr=0.1, steps=1, samples=32))
        >>> Call.decode(call.encode()) == call
        True
        """
        wants, replica, sequence, read_at, lr, steps, samples = words.tolist()
        return cls(int(wants), Push(int(replica), int(sequence), int(read_at), lr, int(steps), int(samples)))


@functools.cache
def _device(address: str) -> Any:
    """The network device that leads to the store; one for all pairs of a process."""
    host, port = split_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: asks the kernel for the way
        local = probe.getsockname()[0]
    return dist.ProcessGroupGloo.create_device(hostname=local)


def pair_group(store: Store, address: str, shard: int, number: int, side: int) -> Pair:
    """Build the pair of a call; raises RuntimeError if the other side does not within CONNECT_S."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device(address)]
    options._timeout = timedelta(seconds=CONNECT_S)
    options._threads = 1
    own = dist.PrefixStore(f"pair/{shard}/{number}", store)  # type: ignore[attr-defined, arg-type]
    pair: Pair = dist.ProcessGroupGloo(own, side, 2, options)  # type: ignore[assignment]
    return pair


class Link:
    """A replica's line to one shard."""

    def __init__(
        self, address: str, shard: int, spans: list[tuple[int, int]], meanwhile: Callable[[], None] = lambda: None
    ):
        """`spans` are the chunks of the shard.

        `meanwhile` is called before every attempt to connect: whoever can repair the shard does it there.
        """
        self._address, self._shard, self._spans, self._meanwhile = address, shard, spans, meanwhile
        self._store = connect_store(address)
        self._group: Pair | None = None
        self._under_way: tuple[list[Any], list[Any], Tensor, tuple[Any, ...]] | None = None

    def start(self, call: Call, vector: Tensor | None, weights: Tensor | None) -> None:
        """Send a call, with the vector that it pushes, and make ready for the reply; returns at once."""
        if self._group is None:
            self._connect()
        group = self._group
        assert group is not None
        words, reply = call.encode(), torch.zeros(REPLY_WORDS, dtype=torch.float64)
        with contextlib.suppress(RuntimeError):  # told by `finish`, which mends it
            self._under_way = None
            sends = [group.send([words], SHARD_SIDE, 0)]
            if vector is not None:
                sends += [group.send([vector[a:b]], SHARD_SIDE, 1) for a, b in self._spans]
            receives = [group.recv([reply], SHARD_SIDE, 2)]
            if weights is not None:
                receives += [group.recv([weights[a:b]], SHARD_SIDE, 3) for a, b in self._spans]
            self._under_way = sends, receives, reply, (words, vector, weights)  # kept alive until they have travelled

    def finish(self, call: Call, vector: Tensor | None, weights: Tensor | None) -> Receipt:
        """Wait for the reply to a started call; mend the line and send the call again if it broke."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self._under_way is None:
                    raise RuntimeError("the call could not be sent")
                sends, receives, reply, _ = self._under_way
                for work in (*sends, *receives):
                    work.wait(timedelta(seconds=REPLY_S))
                accepted, staleness, version = (int(word) for word in reply.tolist())
                return Receipt(bool(accepted), staleness, version)
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    raise RunError(f"Shard {self._shard} was away for more than {PATIENCE_S:g} s ({error}).") from None
                self._group = None
                self.start(call, vector, weights)

    def leave(self) -> None:
        """Say goodbye, so that the shard does not take this for a death."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                self._group.send([Call(LEAVE).encode()], SHARD_SIDE, 0).wait(timedelta(seconds=REPLY_S))
        self._group = None

    def _connect(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while not self._store.check([f"shard/{self._shard}"]) and time.monotonic() < deadline:
                self._meanwhile()
                time.sleep(LOOK_S)
            self._meanwhile()
            number = self._store.add(f"calls/{self._shard}", 1) - 1
            self._store.set(f"call/{self._shard}/{number}", "call")
            try:
                self._group = pair_group(self._store, self._address, self._shard, number, REPLICA_SIDE)
                return
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"Shard {self._shard} of the server at {self._address} did not answer for {PATIENCE_S:g} s."
                    ) from None
