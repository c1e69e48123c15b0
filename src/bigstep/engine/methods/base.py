"""The seam between loop and method: a method takes a step and returns what it gave and cost; the loop knows no more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from bigstep.data.feed import Request
from bigstep.data.sampler import Step
from bigstep.engine.state import Carried

__all__ = ["Batches", "Method", "Note", "Outcome"]

Batches = Iterator[tuple[Any, Any]]
"""(inputs, target) on the device, one for each request."""


class Note(NamedTuple):
    """A remark about the run, with facts for the records."""

    text: str
    facts: Mapping[str, Any] = {}  # noqa: RUF012 - never changed


@dataclass(frozen=True)
class Outcome:
    """What one step gave and cost on this rank."""

    loss: Tensor
    """This rank's part of the mean loss, in float64; the device may still be computing it."""
    data_s: float = 0.0
    """Seconds of waiting for input."""
    exchange_s: float = 0.0
    """Seconds of exchange that no computation hid."""
    bytes_sent: float = 0.0
    noise: Tensor | None = None
    """This rank's part of a measurement of the noise scale; all ranks have one in the same steps."""
    steady: bool = True
    """False while the method is still trying out how to run."""
    notes: tuple[Note, ...] = ()
    keep: bool = False
    """Whether each rank should save what it holds: its islands have just met the others. The same on all ranks."""


class Method(Protocol):
    """A way of taking a step. Every rank calls every function, in the same order."""

    def requests(self, steps: Iterable[Step]) -> Iterator[Request]:
        """Yield this rank's requests to its feed for some steps of one epoch, one for each batch."""

    def step(self, step: Step, batches: Batches) -> Outcome:
        """Take one step: forwards, backwards, whatever is exchanged, and the update."""

    def finish(self) -> None:
        """Apply what the last step left pending; called once, after the last step of a run."""

    def evaluation(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Lend out the model for an evaluation, the same on every rank, then put it back into training mode."""

    def rehearse(self) -> None:
        """Run one forward and backward outside graphs, without side effects, so that a profile sees the operations."""

    def parts(self) -> Mapping[str, Carried]:
        """Return what this method carries from step to step, by name."""

    def close(self) -> None:
        """Let go of threads and connections."""
