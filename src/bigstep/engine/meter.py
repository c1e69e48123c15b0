"""What each step gave and cost, collected without slowing the step down.

Losses stay on the device until a flush, which sums them over ranks in one small message together with each rank's
times. The number of steps between flushes follows from those sums, so that all ranks flush at the same step.

On a single GPU a flush leaves the newest step for the next flush, so that the GPU has work meanwhile. Otherwise it
would be idle from the end of that step until the host has reported it and launched another.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigstep.data.sampler import Step
from bigstep.data.waits import Waits
from bigstep.engine.methods.base import Outcome
from bigstep.engine.ranks import Ranks
from bigstep.exchange.clock import Clock, Mark

__all__ = ["Flush", "Meter", "StepCost", "measured_on_device"]

_SECONDS_BETWEEN_FLUSHES = 0.5
_MOST_STEPS_BETWEEN_FLUSHES = 20  # a straggler is named after two flushes, a signal heard after one


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step on this rank."""

    total_s: float
    data_s: float
    exchange_s: float

    @property
    def compute_s(self) -> float:
        """What is left for forward, backward and update."""
        return max(0.0, self.total_s - self.data_s - self.exchange_s)


@dataclass(frozen=True)
class Flush:
    """The results of some steps, summed over ranks: the same on all ranks except for the times in the rows."""

    rows: list[dict[str, Any]]
    noise: dict[int, list[float]]
    """By index of a row, squared norms and batch sizes of the two gradients of its step: |g_b|^2, b, |g_B|^2, B."""
    compute_by_rank: list[float]
    data_by_rank: list[float]
    votes: list[float]
    elapsed_s: float
    """On this rank, from the end of the step before them to the end of the last of them, without pauses."""
    step: Step
    """The last of these steps."""
    final: bool
    """Whether the run ends with it."""


def measured_on_device(
    costs: list[StepCost], elapsed_s: float, waits: list[float], batches: list[int]
) -> list[StepCost]:
    """Return the costs of some steps, with the waits for data as the device measured them, batch by batch.

    Args:
        costs: As the host measured them.
        elapsed_s: Seconds that the steps took until the device had finished them.
        waits: Seconds for which the device waited for each batch.
        batches: How many batches had been handed out when each step was done.

    >>> costs = [StepCost(0.001, 0.0, 0.0)] * 2  # the host ran ahead and saw nothing
    >>> [cost.data_s for cost in measured_on_device(costs, 0.1, [0.02, 0.01, 0.0], [2, 3])]
    [0.03, 0.0]
    """
    begins = [0, *batches[:-1]]
    waited = [sum(waits[begin:end]) for begin, end in zip(begins, batches, strict=True)]
    rest_s = max(0.0, elapsed_s - sum(waited)) / len(costs)  # a wait counts in its own step only
    return [StepCost(data_s + rest_s, data_s, cost.exchange_s) for cost, data_s in zip(costs, waited, strict=True)]


class _Pause(NamedTuple):
    """Something other than a step, done between two steps."""

    seconds: float
    before: Mark
    """The end of the step before."""
    end: Mark

    def idle_s(self) -> float:
        """Return the seconds in which the device was idle: it may have ended the step before during the pause."""
        return min(self.seconds, self.end.seconds_since(self.before))


class _Taken(NamedTuple):
    """A step that is not reported yet."""

    step: Step
    row: dict[str, Any]
    loss: Tensor
    cost: StepCost
    noise: Tensor | None
    batches: int
    """Batches handed out since the beginning, counted when the host was done with the step."""
    pauses: list[_Pause]
    """Between the step before and this one."""
    end: Mark
    """When the device has finished it."""


class Meter:
    """Collects training rows until they are due."""

    def __init__(self, ranks: Ranks, seconds_before: float = 0.0, tokens: int = 0, waits: Waits | None = None) -> None:
        """Args:
        ranks: Those of the run.
        seconds_before: What the run took before it was resumed.
        tokens: Per sample; 0 if samples are not sequences.
        waits: A GPU's waits for batches; None if they are not measured.
        """
        self._tokens, self._waits = tokens, waits
        self._batches = 0
        """Batches handed out up to the last step reported."""
        if waits is not None:
            waits.forget()
        self._ranks = ranks
        self._cuda = ranks.device.type == "cuda"
        self._beside: torch.cuda.Stream | None = None
        """A stream to read results in while the GPU works on; ranks that wait for each other gain nothing by it."""
        if self._cuda and ranks.size == 1:
            self._beside = torch.cuda.Stream(ranks.device, priority=-1)  # type: ignore[no-untyped-call]  # untyped in torch
        self._taken: list[_Taken] = []
        self._clock = Clock(ranks.device)
        self._told = self._last = self._clock.mark()
        """The ends of the last step that was reported, and of the last that was taken."""
        self._pauses: list[_Pause] = []
        """Since the last step that was taken."""
        self._begun = self._started = time.perf_counter()
        self._seconds_before = seconds_before
        self._interval = 1
        self.loss = math.nan
        """The last loss that was finite."""

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run, those before an interruption included."""
        return self._seconds_before + time.perf_counter() - self._started

    @property
    def due(self) -> bool:
        """Whether enough steps have been collected for a flush; the same on all ranks."""
        return len(self._taken) >= self._interval

    def begin(self) -> None:
        """Start the clock of a step."""
        self._begun = time.perf_counter()

    def add(self, step: Step, outcome: Outcome, /, **row: Any) -> None:
        """Add the step that was begun; `row` is what else belongs in its record."""
        cost = StepCost(time.perf_counter() - self._begun, outcome.data_s, outcome.exchange_s)
        batches = 0 if self._waits is None else self._batches + len(self._waits)
        row = {"kind": "train", **row, "bytes_sent": outcome.bytes_sent}
        pauses, self._pauses, self._last = self._pauses, [], self._clock.mark()
        self._taken.append(_Taken(step, row, outcome.loss, cost, outcome.noise, batches, pauses, self._last))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of what is done between two steps, such as an evaluation, unless a GPU is still busy."""
        paused = time.perf_counter()
        yield
        if self._last.has_passed():
            self._pauses.append(_Pause(time.perf_counter() - paused, self._last, self._clock.mark()))

    def flush(self, votes: list[float], *, whole: bool, final: bool) -> Flush:
        """Return the gathered rows with global losses; every rank must call this at the same step.

        Args:
            votes: Numbers to sum over ranks in the same message, for decisions that all ranks must take alike.
            whole: Report the newest step too, even though a GPU is idle meanwhile.
            final: Whether the run ends with it.
        """
        count = len(self._taken)
        if self._beside is not None and not whole and count > 1:
            count -= 1
        taken, self._taken = self._taken[:count], self._taken[count:]
        # waits for these steps only: copies of batches or a mean of islands may continue in other streams
        passed_s = taken[-1].end.seconds_since(self._told)
        elapsed_s = max(passed_s - sum(pause.idle_s() for each in taken for pause in each.pauses), 1e-9)
        self._told, seconds = taken[-1].end, self.seconds
        costs, size = self._costs(taken, elapsed_s), self._ranks.size
        small = torch.zeros(2 * size + 1 + len(votes), dtype=torch.float64)
        small[self._ranks.rank] = sum(each.cost.compute_s for each in taken)  # by the host: no waits for other ranks
        small[size + self._ranks.rank] = sum(cost.data_s for cost in costs)
        small[2 * size :] = torch.tensor([elapsed_s, *votes], dtype=torch.float64)
        noises = {index: each.noise for index, each in enumerate(taken) if each.noise is not None}
        with contextlib.nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            losses = torch.stack([each.loss for each in taken])
            message = torch.cat([losses, small.to(losses.device), *noises.values()])
            sums = iter(self._ranks.sum_(message).tolist())  # waits for the device
        losses_of_all, compute_by_rank, data_by_rank, (elapsed_of_all,), agreed = (
            list(itertools.islice(sums, length)) for length in (count, size, size, 1, len(votes))
        )
        noise = {index: list(itertools.islice(sums, 4)) for index in noises}
        rows = [each.row for each in taken]
        self._complete(rows, costs, losses_of_all, compute_by_rank, elapsed_s, seconds)
        wanted = _SECONDS_BETWEEN_FLUSHES * count * size / elapsed_of_all
        self._interval = int(min(max(wanted, 1), _MOST_STEPS_BETWEEN_FLUSHES))
        return Flush(rows, noise, compute_by_rank, data_by_rank, agreed, elapsed_s, taken[-1].step, final)

    def _costs(self, taken: list[_Taken], elapsed_s: float) -> list[StepCost]:
        """Return the costs of steps, on a GPU by its own clock; for data already in its memory it does not wait."""
        costs = [each.cost for each in taken]
        if not self._cuda:
            return costs
        batches = [each.batches - self._batches for each in taken]
        waits = [] if self._waits is None else self._waits.take(batches[-1])
        self._batches += batches[-1]
        return measured_on_device(costs, elapsed_s, waits, batches)

    def _complete(
        self,
        rows: list[dict[str, Any]],
        costs: list[StepCost],
        losses: list[float],
        compute_by_rank: list[float],
        elapsed_s: float,
        seconds: float,
    ) -> None:
        """Add to the rows what only the flush has found."""
        per_s = sum(row["batch"] for row in rows) / elapsed_s
        slowest = max(range(self._ranks.size), key=compute_by_rank.__getitem__)
        for row, loss, cost in zip(rows, losses, costs, strict=True):
            row |= {
                "loss": loss,
                "images_per_s": per_s,
                "seconds": seconds,
                "compute_s": cost.compute_s,
                "exchange_s": cost.exchange_s,
                "data_s": cost.data_s,
            }
            if self._tokens:
                row["tokens_per_s"] = per_s * self._tokens
            if self._ranks.size > 1:
                row["slowest_rank"] = slowest
            if math.isfinite(loss):
                self.loss = loss
