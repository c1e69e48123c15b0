"""Synchronous SGD on logical workers: a step is the mean gradient over all workers, and one update with it.

A rank runs its workers' samples forward after forward, each weighted by its share of the step; how a forward and its
backward are computed, and how gradients meet those of other ranks, is the pass's (`eager`, `graphed`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bigstep.data.feed import Request
from bigstep.data.sampler import Step
from bigstep.engine.learner import Learner
from bigstep.engine.methods.base import Batches, Note, Outcome
from bigstep.engine.methods.forwards import Forward, Forwards
from bigstep.engine.methods.noise_probe import Probe, not_seen
from bigstep.engine.ranks import Ranks
from bigstep.engine.state import Carried, Count, Weights
from bigstep.norm import other_buffers, set_workers

__all__ = ["Gathered", "Pass", "Synchronous"]

_MEASURE_EVERY = 10
"""Steps between two measurements of the noise scale: each costs a copy of the gradient and two norms."""


class Pass(Protocol):
    """How forward, backward, exchange and update are computed."""

    gives_mean: bool
    """Whether a step leaves the mean gradient itself, so that noise can be measured on it."""
    counts: float
    """What the gradient of the step at hand counts in its update: 1, or the part of a full batch that it holds."""

    def add(self, inputs: Any, target: Any, weight: float, *, last: bool, keep: bool) -> Tensor:
        """Add `weight` times the gradient of a forward's mean loss; return that loss, times the weight.

        Args:
            inputs: Of the forward; None for a rank without samples, whose gradient is 0.
            target: Of the forward.
            weight: What it counts in the step.
            last: The rank's last forward of the step: gradients are exchanged within it.
            keep: Keep this rank's own gradients, so that `own_gradients` can give them.
        """

    def own_gradients(self) -> list[Tensor | None]:
        """Return what this rank's forwards have added so far, parameter by parameter, also behind the exchange."""

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of the step, parameter by parameter."""

    @property
    def own_weight(self) -> float:
        """By what the gradients of this rank are larger than their part of the mean."""

    @property
    def loss_scale(self) -> Tensor | float:
        """By what all gradients are too large."""

    def complete(self, step: Step, inputs: Any) -> bool:
        """Finish the gradient; return whether it can be used. `inputs` are those of this rank's last forward."""

    def update(self) -> None:
        """Update the weights with what the gradient counts, and clear it."""

    def flush(self) -> None:
        """Update with a gradient that is still on its way, if there is one."""

    def ended(self) -> tuple[Note, ...]:
        """Take note of the end of a step."""

    @property
    def steady(self) -> bool:
        """Whether the pass has found out how to run best."""

    def traffic(self) -> tuple[float, float]:
        """Return the seconds of exposed exchange and the bytes sent by this rank, since the beginning."""

    def guard(self) -> contextlib.AbstractContextManager[object]:
        """Turn errors of an exchange that failed into its sentence."""

    def renew(self) -> None:
        """Take note that the weights were changed by somebody else."""

    def rehearse(self) -> None:
        """Run a forward and backward in the open, and leave no trace."""

    def parts(self) -> Mapping[str, Carried]:
        """Return what the pass carries, by name."""

    def close(self) -> None:
        """Let go of threads and connections."""


class Gathered(NamedTuple):
    """What the forwards and backwards of a step gave."""

    loss: Tensor
    data_s: float
    noise: Tensor | None


@dataclass(frozen=True)
class _OfAllRanks:
    """Batch-norm statistics, of which each rank holds a share; the first puts them together."""

    learner: Learner
    ranks: Ranks

    def state_dict(self) -> list[Any] | None:
        return self.ranks.to_first(self.learner.statistics.state_dict(first=self.ranks.first))

    def load_state_dict(self, state: list[Any]) -> None:
        self.learner.statistics.load_state_dict(state, self.ranks.rank, self.ranks.size)


class Synchronous:
    """The method of every run whose workers wait for one another.

    Args:
        learner: What is trained.
        passes: How a forward and backward run.
        forwards: Which samples go through together.
        ranks: Those that share the workers of this learner.
        seed: Of the run.
        measure: Measure the noise scale on the way.
        weigh: Let the gradient of an incomplete batch count as much as its samples.
    """

    def __init__(
        self,
        learner: Learner,
        passes: Pass,
        forwards: Forwards,
        ranks: Ranks,
        seed: int,
        *,
        measure: bool = True,
        weigh: bool = True,
    ):
        self.learner, self.passes, self.forwards, self.ranks = learner, passes, forwards, ranks
        self.first_worker = 0
        """The number of the first worker of the steps to come, among all workers of the run."""
        self._measure, self._weigh = measure, weigh
        self.skipped = Count()
        """Steps that were dropped because their gradient was not finite."""
        self._seed = seed

    def requests(self, steps: Iterable[Step]) -> Iterator[Request]:
        """Yield one request a forward."""
        return self.forwards.requests(steps, self._is_cut)

    def step(self, step: Step, batches: Batches) -> Outcome:
        """Take the gradient and update with it."""
        exposed, sent = self.passes.traffic()
        with self.passes.guard():
            gathered = self.accumulate(step, batches)
        self.passes.update()
        notes, steady = self.passes.ended(), self.passes.steady
        exposed_now, sent_now = self.passes.traffic()
        return Outcome(
            gathered.loss, gathered.data_s, exposed_now - exposed, sent_now - sent, gathered.noise, steady, notes
        )

    def accumulate(self, step: Step, batches: Batches) -> Gathered:
        """Leave the mean gradient of a step; all ranks call this, also those that have no samples in it."""
        measured = self.measures(step)
        self.passes.counts = step.filled if self._weigh else 1.0
        forwards = self.forwards.of(step, cut=self._is_cut(step))
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        noise = not_seen(self.ranks.device) if measured else None
        data_s, seen, inputs = 0.0, 0, None
        probe: Probe | None = None
        weights = self.forwards.weights(step, forwards)
        for index, (forward, weight) in enumerate(zip(forwards, weights, strict=True)):
            inputs, target, wait_s = self._begin(step, forward, seen, batches)
            is_probed = measured and forward.first_worker == 0
            added = self.passes.add(inputs, target, weight, last=index == len(forwards) - 1, keep=is_probed)
            loss += added.view(())  # a user's own may give its one number in any shape
            if is_probed:
                probe = Probe(self.passes.own_gradients(), forward.size, step.size, weight * self.passes.own_weight)
            data_s += wait_s
            seen += forward.workers
        if not forwards:
            self.passes.add(None, None, 0.0, last=True, keep=False)
        if probe is not None:
            noise = probe.compare(self.passes.gradients(), self.passes.loss_scale)
        if self.passes.complete(step, inputs):
            self.learner.statistics.end_step(seen / step.active, step.filled)
        else:
            self.skipped.value += 1
        return Gathered(loss, data_s, noise)

    def measures(self, step: Step) -> bool:
        """Whether the noise scale is measured in a step: the same on all ranks, and if the run is resumed.

        It cannot be where all samples are one worker's, nor where the exchange hands out something else than the mean.
        """
        if not self._measure or step.active < 2 or not self.passes.gives_mean:
            return False
        if self.forwards.measured:
            return step.position.step % self.forwards.measured == 0
        batch, every = step.workers * step.local_batch, _MEASURE_EVERY
        if self.ranks.size == 1 and self.ranks.device.type == "cuda" and batch <= self.forwards.max_samples:
            every = max(every, self.forwards.cut_every // batch)
        return step.position.step % every == 0

    def _is_cut(self, step: Step) -> bool:
        """Whether a rank that is alone runs two forwards at least, so that they can be compared."""
        return (self.ranks.size == 1 or self.forwards.measured > 0) and self.measures(step)

    def finish(self) -> None:
        """Use the gradient that double buffering still has on its way."""
        self.passes.flush()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Lend out the model, with batch-norm statistics that are averaged over all workers.

        What else a network notes in buffers as it trains, each rank for itself, is rank 0's for all, as under DDP.
        """
        self.learner.statistics.synchronize(self.ranks.sum_)
        self.ranks.take_first_(other_buffers(self.learner.model))
        self.learner.model.eval()
        try:
            yield self.learner.model
        finally:
            self.learner.model.train()

    def rehearse(self) -> None:
        """Run a forward and backward in the open, for a profile."""
        self.passes.rehearse()

    def parts(self) -> dict[str, Carried]:
        """Weights, optimizer, statistics, what the pass carries, and how many steps were dropped."""
        return {
            "model": Weights(self.learner.model),
            "optimizer": self.learner.optimizer,
            "statistics": _OfAllRanks(self.learner, self.ranks),
            **self.passes.parts(),
            "skipped": self.skipped,
        }

    def close(self) -> None:
        """Let go of the exchange."""
        self.passes.close()

    def _begin(self, step: Step, forward: Forward, seen: int, batches: Batches) -> tuple[Any, Any, float]:
        """Make ready for a forward, `seen` workers of this step being done; return input, target and the wait."""
        asked = time.perf_counter()
        inputs, target = next(batches)
        waited_s = time.perf_counter() - asked
        self.learner.statistics.begin_forward(seen, forward.workers)
        if self.forwards.max_samples > 1:  # else every forward holds one worker
            set_workers(self.learner.model, forward.workers)
        self._tie_randomness(step, forward)
        return inputs, target, waited_s

    def _tie_randomness(self, step: Step, forward: Forward) -> None:
        """Tie dropout and the like to (seed, step, worker), so that they do not depend on the number of ranks.

        The generators are seeded directly: `torch.manual_seed` also prepares devices that are not there, at a cost
        that shows beside a small forward.
        """
        seed = (self._seed * 1_000_003 + step.position.step) * 1_000_003 + self.first_worker + forward.first_worker
        torch.default_generator.manual_seed(seed)
        if self.ranks.device.type == "cuda":
            torch.cuda.manual_seed(seed)
