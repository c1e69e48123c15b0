"""The seam: a method takes a step, and says what it cost and gave. Nothing else of it is known to the loop."""

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
    """This rank's part of the mean loss, in float64; it may still be on its way."""
    data_s: float = 0.0
    """Seconds of waiting for input."""
    exchange_s: float = 0.0
    """Seconds of exchange that no computation hid."""
    bytes_sent: float = 0.0
    noise: Tensor | None = None
    """This rank's part of a measurement of the noise scale; all ranks have one in the same steps."""
    steady: bool = True
    """False while the method still tries out how to run."""
    notes: tuple[Note, ...] = ()
    keep: bool = False
    """What this rank holds is worth keeping by itself: its islands have met the others. The same on all ranks."""


class Method(Protocol):
    """A way of taking a step. Every rank calls every function, in the same order."""

    def requests(self, steps: Iterable[Step]) -> Iterator[Request]:
        """Yield what this rank asks of its feed for some steps of one epoch, one request for each batch."""

    def step(self, step: Step, batches: Batches) -> Outcome:
        """Take one step: forwards, backwards, whatever is exchanged, and the update."""

    def finish(self) -> None:
        """Apply what the last step left on its way; called once, behind the last step of a run."""

    def evaluation(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Lend out the model to evaluate, the same on every rank, and take it back into training."""

    def rehearse(self) -> None:
        """Where steps hide what they do (in a graph), do it once in the open and leave no trace: for a profile."""

    def parts(self) -> Mapping[str, Carried]:
        """Return what this method carries from step to step, by name."""

    def close(self) -> None:
        """Let go of threads and connections."""
