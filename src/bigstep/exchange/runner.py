"""Exchanges that run beside backward, on threads or on a CUDA stream, and the time that they take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future

from bigstep.errors import RunError
from bigstep.exchange.bucket import Bucket
from bigstep.exchange.clock import Clock, Meter
from bigstep.exchange.line import Line, Steps

__all__ = ["Runner"]


class Runner:
    """Runs the steps of exchanges in the order in which they come.

    Args:
        device: Of the gradients.
        explain: Turns an error and the training step in which it occurred into the error that ends the run.
    """

    def __init__(self, device: torch.device, explain: Callable[[BaseException, int], RunError]) -> None:
        self.stream = _new_stream(device) if device.type == "cuda" else None
        """The stream on which exchanges run; None if they run on threads."""
        self.busy, self.exposed = Meter(), Meter()
        self._explain = explain
        self._clock = Clock(device)
        self._line = Line()

    def run(self, steps: Steps, bucket: Bucket) -> Future[Tensor]:
        """Start the steps of a bucket's exchange; the future completes, with the bucket, when they have ended."""
        if self.stream is None:
            return self._run_on_threads(steps, bucket)
        try:
            return self._run_on_stream(steps, bucket, self.stream)
        except Exception as error:
            raise self._explain(error, bucket.step) from error

    def note_exposed(self, futures: list[Future[Tensor]]) -> None:
        """Note that a backward has just handed over its last bucket; `futures` are all of its exchanges."""
        ready = self._clock.mark()
        if self.stream is not None:
            with torch.cuda.stream(self.stream):
                self.exposed.add(ready, self._clock.mark())
            return
        for future in futures:
            future.add_done_callback(lambda _: self.exposed.add(ready, self._clock.mark()))

    def close(self) -> None:
        """Wait for what is under way and end the threads."""
        self._line.close()

    def _run_on_threads(self, steps: Steps, bucket: Bucket) -> Future[Tensor]:
        begun = self._clock.mark()
        ended: Future[Tensor] = Future()
        failures: list[RunError] = []

        def end(error: BaseException | None) -> None:
            self.busy.add(begun, self._clock.mark())
            if error is not None:
                failures.append(self._explain(error, bucket.step))
            ended.set_result(bucket.flat)

        def value(future: Future[Tensor]) -> Tensor:
            if failures:
                raise failures[0]
            return future.value()

        # Future.set_exception reaches only Python's wait; an error raised in `then` reaches DDP's C++ wait as well
        result = ended.then(value)
        self._line.submit(steps, end)
        return result

    def _run_on_stream(self, steps: Steps, bucket: Bucket, stream: torch.cuda.Stream) -> Future[Tensor]:
        """On CUDA no thread is needed: a wait blocks only the exchange's own stream, which works in issue order."""
        device = bucket.flat.device
        stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in (bucket.flat, *bucket.held):
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            begun = self._clock.mark()
            for under_way in steps:
                for work in under_way:
                    work.wait()
            self.busy.add(begun, self._clock.mark())
            future: Future[Tensor] = Future(devices=[device])
            future.set_result(bucket.flat)
        return future


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's, without annotations
