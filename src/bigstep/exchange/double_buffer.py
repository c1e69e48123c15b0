"""Double buffering: each backward returns the gradient of the one before, while its own is being exchanged.

Each backward is one step. Its exchange runs during the forward and backward of the next, and each update uses the
gradient of the step before, which is one step old. What comes back is always exactly one backward late, however fast
the network is, so a run is deterministic. The first backward gets zeros; `flush` hands out the last gradient.

The paper splits a minibatch in two, exchanges each half by itself and calls both together one minibatch: its minibatch
of N is two steps of N/2 here.

Reference:
    Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent, Interspeech 2014, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.futures import Future

from bigstep.exchange.bucket import Bucket

__all__ = ["DoubleBuffer"]


class DoubleBuffer:
    """The gradients under way, kept by parameter so that DDP may change its buckets."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[Future[Tensor], Tensor]] = {}

    def exchange(
        self, bucket: Bucket, start: Callable[[Bucket], Future[Tensor]], stream: torch.cuda.Stream | None
    ) -> Future[Tensor]:
        """Start the exchange of a copy of the bucket; fill the bucket itself with the gradient exchanged before."""
        before = [self._under_way.get(name) for name in bucket.names]
        fresh = replace(bucket, flat=bucket.flat.clone())
        # before `start`: a stream works in order, and the delivery must not wait for the exchange of `fresh`
        delivered = _deliver(before, bucket, stream)
        future = start(fresh)
        for name, piece in zip(bucket.names, fresh.flat.split_with_sizes(bucket.sizes), strict=True):
            self._under_way[name] = (future, piece)
        return delivered

    def finish(self) -> dict[str, Tensor]:
        """Wait for what is under way; the flat mean gradient of each parameter."""
        for future, _ in self._under_way.values():
            future.wait()
        return {name: piece for name, (_, piece) in sorted(self._under_way.items())}

    def load(self, pieces: dict[str, Tensor]) -> None:
        """Hand these gradients out next; a parameter that is not among them gets zeros."""
        self._under_way = {}
        for name, piece in pieces.items():
            future: Future[Tensor] = Future()
            future.set_result(piece)
            self._under_way[name] = (future, piece)


def _deliver(
    before: list[tuple[Future[Tensor], Tensor] | None], bucket: Bucket, stream: torch.cuda.Stream | None
) -> Future[Tensor]:
    pieces = bucket.flat.split_with_sizes(bucket.sizes)

    def fill() -> None:
        for piece, old in zip(pieces, before, strict=True):
            piece.zero_() if old is None else piece.copy_(old[1])

    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(bucket.flat.device))
        with torch.cuda.stream(stream):
            fill()
            future: Future[Tensor] = Future(devices=[bucket.flat.device])
            future.set_result(bucket.flat)
        return future

    def value(ended: Future[list[Future[Tensor]]]) -> Tensor:
        for one in ended.value():
            one.value()  # raises the error that ended the exchange
        fill()
        return bucket.flat

    return torch.futures.collect_all([old[0] for old in before if old is not None]).then(value)
