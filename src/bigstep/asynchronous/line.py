"""The line between one replica and one shard: what travels on it, and how it is repaired.

Each line is a connection of its own, so a process that joins, leaves or dies affects no other line. A shard listens
behind a gate and tells the store where; a replica connects there, and the shard answers it in a thread of its own.

On the wire, per exchange: a call of 7 float64 (what is wanted, and the facts of a push) and the pushed vector, if any;
the answer is the weights, if wanted, each chunk as soon as it is up to date, and a reply of 3 float64. All lengths
follow from the layout: none is read from the wire.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from bigstep.asynchronous.gate import Rendezvous, connect
from bigstep.asynchronous.reports import LOOK_S
from bigstep.asynchronous.shard import Push, Receipt
from bigstep.asynchronous.store import Store
from bigstep.errors import RunError

__all__ = ["CALL_WORDS", "FETCH", "LEAVE", "PUSH", "PUT", "Call", "Line", "receive_into", "view_of"]

PUSH, FETCH, PUT, LEAVE = 1, 2, 4, 8
"""What a call asks for; push and fetch may come together."""

CALL_WORDS, REPLY_WORDS = 7, 3

CONNECT_S = 20.0
"""How long one attempt to connect may take."""

REPLY_S = 120.0
"""After this long without any progress a line counts as broken."""

PATIENCE_S = 300.0
"""How long a replica waits for a shard that is being restarted."""

_LARGEST_RATE = 1e38
"""Learning rates must stay below it; float32 still holds it."""

_MOST_AT_ONCE = 1 << 20
"""Bytes given to the system in one call, so that the other direction has its turn."""


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
        """Read what `encode` wrote; raises ValueError if no replica can have written it.

        >>> call = Call(PUSH | FETCH, Push(replica=1, sequence=2, read_at=3, lr=0.1, steps=1, samples=32))
        >>> Call.decode(call.encode()) == call
        True
        """
        wants, replica, sequence, read_at, lr, steps, samples = words.tolist()
        call = cls(int(wants), Push(int(replica), int(sequence), int(read_at), lr, int(steps), int(samples)))
        push = call.push
        counts = push.replica, push.sequence - 1, push.read_at, push.steps, push.samples
        if call.wants & PUSH and not (min(counts) >= 0 and abs(lr) < _LARGEST_RATE):
            raise ValueError(f"{push} is no push")
        return call


def view_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    return tensor.numpy().data.cast("B") if tensor.numel() else memoryview(b"")


def receive_into(line: socket.socket, tensor: Tensor) -> None:
    """Fill a tensor; raises OSError if the line ends before."""
    left = view_of(tensor)
    while left:
        count = line.recv_into(left)
        if not count:
            raise ConnectionError("the other side closed the connection")
        left = left[count:]


def exchange(line: socket.socket, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
    """Send and receive at once: a side that only sent would fill both buffers and wait for ever."""
    sending = deque(view for tensor in outgoing if (view := view_of(tensor)))
    receiving = deque(view for tensor in incoming if (view := view_of(tensor)))
    line.setblocking(False)
    poll = select.poll()
    while sending or receiving:
        poll.register(line, (select.POLLOUT if sending else 0) | (select.POLLIN if receiving else 0))
        if not poll.poll(1000 * REPLY_S):
            raise TimeoutError(f"nothing moved for {REPLY_S:g} s")
        with contextlib.suppress(BlockingIOError):
            if sending:
                _advance(sending, line.send(sending[0][:_MOST_AT_ONCE]))
        with contextlib.suppress(BlockingIOError):
            if receiving:
                count = line.recv_into(receiving[0][:_MOST_AT_ONCE])
                if not count:
                    raise ConnectionError("the shard closed the connection")
                _advance(receiving, count)


def _advance(views: deque[memoryview], count: int) -> None:
    views[0] = views[0][count:]
    if not views[0]:
        views.popleft()


class Line:
    """A replica's line to one shard; one exchange at a time."""

    def __init__(self, store: Store, secret: bytes, shard: int):
        self._store, self._secret, self._shard = store, secret, shard
        self._line: socket.socket | None = None
        self._given_up = False

    def exchange(self, call: Call, vector: Tensor | None, weights: Tensor | None) -> Receipt:
        """Make a call, with the vector that it pushes, and wait for the reply; connect again if the line breaks.

        A push that is sent again is applied once: the shard knows its number.
        """
        deadline = time.monotonic() + PATIENCE_S
        reply = torch.zeros(REPLY_WORDS, dtype=torch.float64)
        outgoing = [call.encode(), *([] if vector is None else [vector])]
        incoming = [*([] if weights is None else [weights]), reply]
        while True:
            try:
                if self._line is None:
                    self._line = self._connect(deadline)
                exchange(self._line, outgoing, incoming)
                accepted, staleness, version = (int(word) for word in reply.tolist())
                return Receipt(bool(accepted), staleness, version)
            except OSError as error:
                self._drop()
                if self._given_up:
                    raise RunError(f"The exchange with shard {self._shard} was aborted, as asked.") from None
                if time.monotonic() > deadline:
                    raise RunError(f"Shard {self._shard} was away for more than {PATIENCE_S:g} s ({error}).") from None

    def leave(self) -> None:
        """Say goodbye, so that the shard does not take this for a death."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                exchange(self._line, [Call(LEAVE).encode()], [])
        self._drop()

    def give_up(self) -> None:
        """Abort an exchange in which another thread waits: its result is no longer needed."""
        self._given_up = True
        if (line := self._line) is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None

    def _connect(self, deadline: float) -> socket.socket:
        """Connect to the shard once the store has its address; raises OSError if the shard is gone again."""
        while (address := self._store.find(f"shard/{self._shard}")) is None:
            if time.monotonic() > deadline or self._given_up:
                raise TimeoutError("it did not come back")
            time.sleep(LOOK_S)
        try:
            return connect(Rendezvous(address, self._secret), CONNECT_S)
        except OSError:
            time.sleep(LOOK_S)  # it is being restarted, and the store will soon know
            raise
