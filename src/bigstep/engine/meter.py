"""What each step cost and gave, collected without slowing the step down.

Losses stay on the device until a flush, which sums them over ranks in one small message together with each rank's
times. The number of steps between flushes follows from those sums, so that all ranks flush at the same step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigstep.engine.ranks import Ranks

__all__ = ["Flushed", "Meter", "StepCost", "seen_by_device"]

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
class Flushed:
    """What a flush told: the same on all ranks but for the rows' own times."""

    rows: list[dict[str, Any]]
    measured: dict[int, list[float]]
    """For the row at an index, the two gradients of its step: |g_b|^2, b, |g_B|^2, B."""
    compute_by_rank: list[float]
    data_by_rank: list[float]
    votes: list[float]
    elapsed_s: float
    """On this rank since the last flush, without pauses."""


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

    def __init__(self, ranks: Ranks, seconds_before: float = 0.0):
        """`seconds_before`: what the run took before it was resumed."""
        self._ranks = ranks
        self._losses: list[Tensor] = []
        self._rows: list[dict[str, Any]] = []
        self._costs: list[StepCost] = []
        self._pairs: dict[int, Tensor] = {}
        self._started = self._flushed = time.perf_counter()
        self._seconds_before = seconds_before
        self._interval = 1
        self._paused_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run, those before an interruption included."""
        return self._seconds_before + time.perf_counter() - self._started

    @property
    def due(self) -> bool:
        """Whether enough steps have gathered; the same on all ranks."""
        return len(self._rows) >= self._interval

    def add(self, loss: Tensor, cost: StepCost, pair: Tensor | None = None, **row: Any) -> None:
        """Note one step; tensors are in float64 and may still be on their way.

        Args:
            loss: This rank's part of the mean.
            cost: Where the time went.
            pair: This rank's part of what `noise_probe` measures; all ranks give one in the same steps.
            row: What else belongs in the record.
        """
        if pair is not None:
            self._pairs[len(self._rows)] = pair
        self._losses.append(loss)
        self._costs.append(cost)
        self._rows.append({"kind": "train", **row})

    def pause(self, seconds: float) -> None:
        """Leave out time between two flushes that no step used, such as an evaluation."""
        self._paused_s += seconds

    def flush(self, *votes: float) -> Flushed:
        """Return the gathered rows with global losses; every rank must call this at the same step.

        Args:
            votes: Numbers to sum over ranks in the same message, for decisions that all ranks must take alike.
        """
        steps, size = len(self._rows), self._ranks.size
        small = torch.zeros(2 * size + len(votes), dtype=torch.float64)
        small[self._ranks.rank] = sum(cost.compute_s for cost in self._costs)  # the host's: no waiting for other ranks
        if self._ranks.device.type == "cuda":
            launched = time.perf_counter()
            torch.cuda.synchronize(self._ranks.device)
            now = time.perf_counter()
            self._costs = seen_by_device(self._costs, now - self._flushed - self._paused_s, now - launched)
        small[size + self._ranks.rank] = sum(cost.data_s for cost in self._costs)
        small[2 * size :] = torch.tensor(votes, dtype=torch.float64)
        losses = torch.stack(self._losses)
        message = torch.cat([losses, small.to(losses.device), *self._pairs.values()])
        sums = self._ranks.sum_(message).tolist()  # waits for the device
        now = time.perf_counter()
        elapsed = max(now - self._flushed - self._paused_s, 1e-9)
        images_per_s = sum(row["batch"] for row in self._rows) / elapsed
        by_rank, rest = sums[steps : steps + 2 * size], sums[steps + 2 * size :]
        agreed, pairs = rest[: len(votes)], rest[len(votes) :]
        measured = {index: pairs[4 * i : 4 * i + 4] for i, index in enumerate(self._pairs)}
        compute_by_rank, data_by_rank = by_rank[:size], by_rank[size:]
        slowest = max(range(size), key=compute_by_rank.__getitem__)
        for row, loss, cost in zip(self._rows, sums[:steps], self._costs, strict=True):
            row |= {
                "loss": loss,
                "images_per_s": images_per_s,
                "seconds": self._seconds_before + now - self._started,
                "compute_s": cost.compute_s,
                "exchange_s": cost.exchange_s,
                "data_s": cost.data_s,
            }
            if size > 1:
                row["slowest_rank"] = slowest
        mean_step_s = sum(compute_by_rank) / (steps * size)
        wanted = _SECONDS_BETWEEN_FLUSHES / max(mean_step_s, 1e-9)
        self._interval = int(min(max(wanted, 1), _MOST_STEPS_BETWEEN_FLUSHES))
        rows, self._rows, self._losses, self._costs, self._pairs = self._rows, [], [], [], {}
        self._flushed, self._paused_s = now, 0.0
        return Flushed(rows, measured, compute_by_rank, data_by_rank, agreed, elapsed)
