"""One shard of the parameter server: its part of the weights, the update rule, and counts of how stale updates were.

No network and no clock here: the order of calls is the order of events.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigstep.asynchronous.chunk import Chunk
from bigstep.asynchronous.layout import Layout

__all__ = ["Push", "Receipt", "Shard"]


@dataclass(frozen=True)
class Push:
    """What comes with a gradient."""

    replica: int
    sequence: int
    """1, 2, 3, … for each replica; a push that is sent again after a broken connection is applied once."""
    read_at: int
    """The version of the weights that the gradient was computed on."""
    lr: float
    steps: int
    """Steps whose gradients are summed in it."""
    samples: int


@dataclass(frozen=True)
class Receipt:
    """What became of a push."""

    accepted: bool
    staleness: int
    """Updates that came between the read and this write."""
    version: int
    """Of the weights afterwards."""


class Shard:
    """Weights and update rule of one shard; safe to call from several threads.

    With AdaGrad, for each element i of a push g:  s_i <- s_i + g_i^2,  w_i <- w_i - gamma * g_i / (sqrt(s_i) + eps).

    >>> layout = Layout(sizes=(2,), decays=(0.0,), averages=0, shards=1, dtype="float32", keep=0.9, max_staleness=0,
    ...                 save_every=0, keep_checkpoints=1, optimizer={"name": "adagrad", "eps": 0.0})
    >>> shard = Shard(layout, 0)
    >>> shard.push(Push(replica=0, sequence=1, read_at=0, lr=0.1, steps=1, samples=4), torch.tensor([3.0, -5.0]))
    Receipt(accepted=True, staleness=0, version=1)
    >>> shard.fetch()  # the first step of AdaGrad has the size of gamma, whatever the gradient
    (tensor([-0.1000,  0.1000]), 1)
    >>> shard.push(Push(replica=1, sequence=1, read_at=0, lr=0.1, steps=1, samples=4), torch.zeros(2)).staleness
    1

    Reference: Dean et al., "Large Scale Distributed Deep Networks", 2012, section 4.1.
    """

    def __init__(self, layout: Layout, index: int):
        self.layout, self.index = layout, index
        start, stop = layout.bounds(index)
        self._weights = torch.zeros(stop - start, dtype=layout.torch_dtype)
        self.spans = layout.chunks(index)
        """Where each chunk begins and ends."""
        self._chunks = [Chunk(layout, self._weights[a:b], _within(layout.pieces(index), a, b)) for a, b in self.spans]
        self._lock = threading.Lock()
        self._verdicts: dict[int, tuple[int, bool]] = {}
        self._applied: list[dict[int, int]] = [{} for _ in self.spans]
        self.version = 0
        self.shares = self.samples = self.refused = 0
        self.staleness: Counter[int] = Counter()

    def put(self, weights: Tensor) -> None:
        """Set the initial weights."""
        with self._lock:
            self._weights.copy_(weights)

    def fetch(self) -> tuple[Tensor, int]:
        """Return a copy of the weights and their version."""
        parts = [self.fetch_chunk(number) for number in range(len(self.spans))]
        return torch.cat([weights for weights, _ in parts]), parts[0][1]

    def push(self, push: Push, vector: Tensor) -> Receipt:
        """Apply a gradient (and the statistics behind it), unless it was applied before or is too stale."""
        receipts = [self.push_chunk(push, number, vector[a:b]) for number, (a, b) in enumerate(self.spans)]
        return receipts[0]

    def fetch_chunk(self, number: int) -> tuple[Tensor, int]:
        """Return a copy of one chunk and the version of the shard; for a fetch, that of chunk 0 counts."""
        with self._lock:
            return self._chunks[number].weights.clone(), self.version

    def push_chunk(self, push: Push, number: int, vector: Tensor) -> Receipt:
        """Apply one chunk of a push; chunks come in order, and those of other pushes may come between them.

        The first chunk decides whether a push is accepted, and how stale it is. Its shares count as done with its last
        chunk: if a replica dies before that, they count as lost.
        """
        with self._lock:
            # a restarted shard may have an older version than the one that a replica read from it
            staleness = max(0, self.version - push.read_at)
            if number == 0:
                self._judge(push, staleness)
            accepted = self._verdicts[push.replica][1]
            applied = self._applied[number]
            if accepted and push.sequence > applied.get(push.replica, 0):
                applied[push.replica] = push.sequence
                self._chunks[number].update(vector, push.lr, push.steps)
                if number == len(self.spans) - 1:
                    self.shares += push.steps
                    self.samples += push.samples
            return Receipt(accepted, staleness, self.version)

    def _judge(self, push: Push, staleness: int) -> None:
        """Accept or refuse a push, unless that was done before."""
        if push.sequence <= self._verdicts.get(push.replica, (0, True))[0]:
            return
        accepted = not 0 < self.layout.max_staleness < staleness
        self._verdicts[push.replica] = push.sequence, accepted
        if accepted:
            self.version += 1
            self.staleness[staleness] += 1
        else:
            self.refused += 1

    def forget_replicas(self) -> None:
        """Prepare for new replicas, which number their pushes from 1 again."""
        with self._lock:
            self._verdicts.clear()
            for applied in self._applied:
                applied.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that decides what the shard does next."""
        with self._lock:
            return {
                "weights": self._weights.clone(),
                "chunks": [chunk.state_dict() for chunk in self._chunks],
                "applied": [dict(applied) for applied in self._applied],
                "verdicts": dict(self._verdicts),
                "version": self.version,
                "shares": self.shares,
                "samples": self.samples,
                "refused": self.refused,
                "staleness": dict(self.staleness),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        with self._lock:
            self._weights.copy_(state["weights"])
            for chunk, memory in zip(self._chunks, state["chunks"], strict=True):
                chunk.load_state_dict(memory)
            self._applied = [dict(applied) for applied in state["applied"]]
            self._verdicts = dict(state["verdicts"])
            self.version = state["version"]
            self.shares, self.samples, self.refused = state["shares"], state["samples"], state["refused"]
            self.staleness = Counter(state["staleness"])


def _within(pieces: list[tuple[int, int, float]], start: int, stop: int) -> list[tuple[int, int, float]]:
    """Cut pieces to [start, stop) and count from its beginning."""
    cut = [(max(first, start) - start, min(last, stop) - start, decay) for first, last, decay in pieces]
    return [piece for piece in cut if piece[0] < piece[1]]
