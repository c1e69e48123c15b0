"""A replica's side of the parameter server: vectors travel in threads of their own, while the replica computes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bigstep.asynchronous.layout import Layout
from bigstep.asynchronous.line import FETCH, PUSH, PUT, Call, Line
from bigstep.asynchronous.shard import Push, Receipt
from bigstep.asynchronous.store import Store

__all__ = ["Client", "Answer"]


@dataclass(frozen=True)
class Answer:
    """What came back from the shards, in their order."""

    receipts: list[Receipt]
    weights: Tensor | None

    @property
    def accepted(self) -> bool:
        """Whether every shard took the push."""
        return all(receipt.accepted for receipt in self.receipts)

    @property
    def staleness(self) -> int:
        """The largest of the shards' counts."""
        return max(receipt.staleness for receipt in self.receipts)

    @property
    def versions(self) -> list[int]:
        """Of the weights on each shard."""
        return [receipt.version for receipt in self.receipts]


class Client:
    """One exchange at a time, with all shards in parallel; `exchange` returns a future at once."""

    def __init__(self, store: Store, secret: bytes, layout: Layout):
        self._layout = layout
        self._lines = [Line(store, secret, shard) for shard in range(layout.shards)]
        self._thread = ThreadPoolExecutor(1, "client")
        self._threads = ThreadPoolExecutor(layout.shards, "line")  # one per shard: none waits for another

    def exchange(self, push: Push | None, versions: list[int], vector: Tensor | None, *, fetch: bool) -> Future[Answer]:
        """Push a vector, fetch the weights, or both; `versions` are those of the weights it was computed on."""
        return self._thread.submit(self._exchange, push, versions, vector, fetch)

    def fetch(self) -> Future[Answer]:
        """Fetch the weights."""
        return self.exchange(None, [0] * self._layout.shards, None, fetch=True)

    def put(self, weights: Tensor) -> Future[Any]:
        """Give the shards their initial weights."""
        return self._thread.submit(self._all, [Call(PUT)] * self._layout.shards, weights, None)

    def give_up(self) -> None:
        """Abandon an exchange under way, and close."""
        for line in self._lines:
            line.give_up()
        self.close()

    def close(self) -> None:
        """Finish the exchange under way, and disconnect from the shards."""
        self._thread.shutdown(wait=True)
        self._threads.shutdown(wait=True)
        for line in self._lines:
            line.leave()

    def _exchange(self, push: Push | None, versions: list[int], vector: Tensor | None, fetch: bool) -> Answer:
        wants = (PUSH if push else 0) | (FETCH if fetch else 0)
        calls = [Call(wants, replace(push, read_at=version)) if push else Call(wants) for version in versions]
        weights = torch.empty(self._layout.size, dtype=self._layout.torch_dtype) if fetch else None
        return Answer(self._all(calls, vector, weights), weights)

    def _all(self, calls: list[Call], vector: Tensor | None, weights: Tensor | None) -> list[Receipt]:
        def part(whole: Tensor | None, shard: int) -> Tensor | None:
            start, stop = self._layout.bounds(shard)
            return None if whole is None else whole[start:stop]

        def one(line: Line, call: Call, shard: int) -> Receipt:
            return line.exchange(call, part(vector, shard), part(weights, shard))

        return list(self._threads.map(one, self._lines, calls, range(self._layout.shards)))
