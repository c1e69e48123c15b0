"""What each step cost and gave, collected without slowing the step down.

Losses stay on the device until a flush, which sums them over ranks in one small message together with each rank's
times. The number of steps between flushes follows from those sums, so that all ranks flush at the same step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigstep.data.sampler import Step
from bigstep.data.waits import Waits
from bigstep.engine.methods.base import Outcome
from bigstep.engine.ranks import Ranks

__all__ = ["Flush", "Meter", "StepCost", "measured_on_device", "seen_by_device"]

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
    """What some steps gave, summed over ranks: the same on all ranks but for the rows' own times."""

    rows: list[dict[str, Any]]
    noise: dict[int, list[float]]
    """For the row at an index, the two gradients of its step: |g_b|^2, b, |g_B|^2, B."""
    compute_by_rank: list[float]
    data_by_rank: list[float]
    votes: list[float]
    elapsed_s: float
    """On this rank since the last flush, without pauses."""
    step: Step
    """The last step."""
    final: bool
    """Whether the run ends with it."""


def measured_on_device(
    costs: list[StepCost], elapsed_s: float, waits: list[float], batches: list[int]
) -> list[StepCost]:
    """Return the costs of some steps with the waits for data that the device measured, batch by batch.

    Args:
        costs: As the host measured them.
        elapsed_s: What the steps took until the device was done.
        waits: Seconds for which the device waited for each batch.
        batches: How many batches had been handed out when each step was done.

    >>> costs = [StepCost(0.001, 0.0, 0.0)] * 2  # the host ran ahead and saw nothing
    >>> [cost.data_s for cost in measured_on_device(costs, 0.1, [0.02, 0.01, 0.0], [2, 3])]
    [0.03, 0.0]
    """
    begins = [0, *batches[:-1]]
    waited = [sum(waits[begin:end]) for begin, end in zip(begins, batches, strict=True)]
    return [
        StepCost(elapsed_s / len(costs), data_s, cost.exchange_s) for cost, data_s in zip(costs, waited, strict=True)
    ]


def seen_by_device(costs: list[StepCost], elapsed_s: float, backlog_s: float) -> list[StepCost]:
    """Return the costs of some steps as a GPU saw them: the host runs ahead, and its waiting may have cost nothing.

    A step takes the device at most as long as the backlog that is left when the host is done with the last step, so it
    was idle for at least elapsed - steps * backlog. Only so much of the wait for data counts.

    Args:
        costs: As the host measured them.
        elapsed_s: What the steps took until the device was done.
        backlog_s: How long the device still worked after the host had launched the last step.

    >>> waited = [StepCost(0.03, 0.025, 0.0)] * 20  # the loaders need 25 ms for a batch
    >>> [round(seen_by_device(waited, elapsed_s, backlog_s)[0].data_s, 3)
    ...  for elapsed_s, backlog_s in ((0.60, 0.01), (0.82, 0.22))]  # a step takes the device 10 ms, or 40
    [0.02, 0.0]
    """
    waited_s, idle_s = sum(cost.data_s for cost in costs), max(0.0, elapsed_s - len(costs) * backlog_s)
    share = min(1.0, idle_s / waited_s) if waited_s else 0.0
    return [StepCost(elapsed_s / len(costs), share * cost.data_s, cost.exchange_s) for cost in costs]


class Meter:
    """Collects training rows until they are due."""

    def __init__(self, ranks: Ranks, seconds_before: float = 0.0, tokens: int = 0, waits: Waits | None = None) -> None:
        """Args:
        ranks: Those of the run.
        seconds_before: What the run took before it was resumed.
        tokens: Of a sample; 0 where samples are no sequences.
        waits: What a GPU measures of its waits for batches; None where nothing does.
        """
        self._tokens, self._waits = tokens, waits
        self._batches: list[int] = []
        if waits is not None:
            waits.forget()
        self._ranks = ranks
        self._losses: list[Tensor] = []
        self._rows: list[dict[str, Any]] = []
        self._costs: list[StepCost] = []
        self._noise: dict[int, Tensor] = {}
        self._begun = self._started = self._flushed = time.perf_counter()
        self._seconds_before = seconds_before
        self._interval = 1
        self._paused_s = 0.0
        self.loss = math.nan
        """The last loss that was finite."""

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run, those before an interruption included."""
        return self._seconds_before + time.perf_counter() - self._started

    @property
    def due(self) -> bool:
        """Whether enough steps have gathered; the same on all ranks."""
        return len(self._rows) >= self._interval

    def begin(self) -> None:
        """Take note that a step begins."""
        self._begun = time.perf_counter()

    def add(self, outcome: Outcome, **row: Any) -> None:
        """Note the step that was begun; `row` is what else belongs in the record."""
        total_s = time.perf_counter() - self._begun
        if outcome.noise is not None:
            self._noise[len(self._rows)] = outcome.noise
        self._losses.append(outcome.loss)
        self._costs.append(StepCost(total_s, outcome.data_s, outcome.exchange_s))
        self._batches.append(0 if self._waits is None else len(self._waits))
        self._rows.append({"kind": "train", **row, "bytes_sent": outcome.bytes_sent})

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out time between two flushes that no step used, such as an evaluation."""
        paused = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - paused

    def flush(self, step: Step, votes: list[float], *, final: bool) -> Flush:
        """Return the gathered rows with global losses; every rank must call this at the same step.

        Args:
            step: The last step.
            votes: Numbers to sum over ranks in the same message, for decisions that all ranks must take alike.
            final: Whether the run ends with it.
        """
        steps, size = len(self._rows), self._ranks.size
        small = torch.zeros(2 * size + len(votes), dtype=torch.float64)
        small[self._ranks.rank] = sum(cost.compute_s for cost in self._costs)  # the host's: no waiting for other ranks
        if self._ranks.device.type == "cuda":
            launched = time.perf_counter()
            # for the steps alone: what is on its way in other streams, batches or a mean of islands, may go on
            torch.cuda.current_stream(self._ranks.device).synchronize()
            now = time.perf_counter()
            elapsed_s = now - self._flushed - self._paused_s
            if self._waits is None:
                self._costs = seen_by_device(self._costs, elapsed_s, now - launched)
            else:
                self._costs = measured_on_device(self._costs, elapsed_s, self._waits.take(), self._batches)
        small[size + self._ranks.rank] = sum(cost.data_s for cost in self._costs)
        small[2 * size :] = torch.tensor(votes, dtype=torch.float64)
        losses = torch.stack(self._losses)
        message = torch.cat([losses, small.to(losses.device), *self._noise.values()])
        sums = self._ranks.sum_(message).tolist()  # waits for the device
        by_rank, rest = sums[steps : steps + 2 * size], sums[steps + 2 * size :]
        compute_by_rank, data_by_rank = by_rank[:size], by_rank[size:]
        agreed, pairs = rest[: len(votes)], rest[len(votes) :]
        noise = {index: pairs[4 * i : 4 * i + 4] for i, index in enumerate(self._noise)}
        elapsed_s = self._complete_rows(sums[:steps], compute_by_rank)
        wanted = _SECONDS_BETWEEN_FLUSHES / max(sum(compute_by_rank) / (steps * size), 1e-9)
        self._interval = int(min(max(wanted, 1), _MOST_STEPS_BETWEEN_FLUSHES))
        rows, self._rows, self._losses, self._costs, self._noise = self._rows, [], [], [], {}
        self._batches = []
        self._flushed, self._paused_s = time.perf_counter(), 0.0
        return Flush(rows, noise, compute_by_rank, data_by_rank, agreed, elapsed_s, step, final)

    def _complete_rows(self, losses: list[float], compute_by_rank: list[float]) -> float:
        """Put into the rows what is known now, and return the seconds since the last flush."""
        now = time.perf_counter()
        elapsed = max(now - self._flushed - self._paused_s, 1e-9)
        per_s = sum(row["batch"] for row in self._rows) / elapsed
        slowest = max(range(self._ranks.size), key=compute_by_rank.__getitem__)
        for row, loss, cost in zip(self._rows, losses, self._costs, strict=True):
            row |= {
                "loss": loss,
                "images_per_s": per_s,
                "seconds": self._seconds_before + now - self._started,
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
        return elapsed
