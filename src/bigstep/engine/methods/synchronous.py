"""Synchronous SGD on logical workers: a step is the mean gradient over all workers, and one update with it.

A rank runs its workers' samples forward after forward, each weighted by its share of the step; the pass (`eager`,
`graphed`) decides how a forward and its backward are computed and how gradients are exchanged with other ranks.
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
    """Whether the gradient of a step is the mean itself, so that noise can be measured on it."""
    counts: float
    """The weight of the current step's gradient in its update: 1, or the fraction of a full batch that it holds."""

    def add(self, inputs: Any, target: Any, weight: float, *, last: bool, keep: bool) -> Tensor:
        """Add `weight` times the gradient of a forward's mean loss; return that loss, times the weight.

        Args:
            inputs: Of the forward; None for a rank without samples, whose gradient is 0.
            target: Of the forward.
            weight: Its share of the step.
            last: The rank's last forward of the step: gradients are exchanged within it.
            keep: Keep this rank's own gradients, so that `own_gradients` can give them.
        """

    def own_gradients(self) -> list[Tensor | None]:
        """Return what this rank's forwards have added so far, parameter by parameter, even after the exchange."""

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of the step, parameter by parameter."""

    @property
    def own_weight(self) -> float:
        """The factor by which this rank's gradients are larger than their share of the mean."""

    @property
    def loss_scale(self) -> Tensor | float:
        """The factor by which all gradients are too large."""

    def complete(self, step: Step, inputs: Any) -> bool:
        """Finish the gradient; return whether it can be used. `inputs` are those of this rank's last forward."""

    def update(self) -> None:
        """Update the weights with the gradient times `counts`, and clear it."""

    def flush(self) -> None:
        """Update with a gradient that is still in flight, if there is one."""

    def ended(self) -> tuple[Note, ...]:
        """Register the end of a step; return remarks on what the pass has found out."""

    @property
    def steady(self) -> bool:
        """Whether the pass has found out how to run best."""

    def traffic(self) -> tuple[float, float]:
        """Return the seconds of exposed exchange and the bytes sent by this rank, since the beginning."""

    def guard(self) -> contextlib.AbstractContextManager[object]:
        """Turn the errors that a failed exchange causes into its own error."""

    def renew(self) -> None:
        """Renew what is derived from the weights: something other than the pass has changed them."""

    def rehearse(self) -> None:
        """Run a forward and backward outside graphs, without side effects."""

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
    """Batch-norm statistics, of which each rank holds a share; rank 0 puts them together."""

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
        measure: Measure the noise scale while training.
        weigh: Scale the gradient of an incomplete batch by the fraction of a full batch that it holds.
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
        """Yield one request per forward."""
        return self.forwards.requests(steps, self._is_cut)

    def step(self, step: Step, batches: Batches) -> Outcome:
        """Compute the gradient and update with it."""
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
        """Compute the mean gradient of a step; all ranks call this, even those that have no samples in it."""
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
            loss += added.view(())  # a user's loss may return its one number in any shape
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
        """Whether the noise scale is measured in a step: the same on all ranks, and in a resumed run.

        It cannot be if one worker has all samples, nor if the exchange yields something other than the mean.
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
        """Whether a step is cut into at least two forwards, so that their gradients can be compared."""
        return (self.ranks.size == 1 or self.forwards.measured > 0) and self.measures(step)

    def finish(self) -> None:
        """Update with the gradient that double buffering still has in flight."""
        self.passes.flush()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Lend out the model, with batch-norm statistics that are averaged over all workers.

        Other buffers that a network updates as it trains differ from rank to rank; all take rank 0's, as under DDP.
        """
        self.learner.statistics.synchronize(self.ranks.sum_)
        self.ranks.take_first_(other_buffers(self.learner.model))
        self.learner.model.eval()
        try:
            yield self.learner.model
        finally:
            self.learner.model.train()

    def rehearse(self) -> None:
        """Run a forward and backward outside graphs, for a profile."""
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
        """Close the exchange."""
        self.passes.close()

    def _begin(self, step: Step, forward: Forward, seen: int, batches: Batches) -> tuple[Any, Any, float]:
        """Prepare a forward, after `seen` workers of this step; return input, target and the seconds of waiting."""
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
        that is noticeable next to a small forward.
        """
        seed = (self._seed * 1_000_003 + step.position.step) * 1_000_003 + self.first_worker + forward.first_worker
        torch.default_generator.manual_seed(seed)
        if self.ranks.device.type == "cuda":
            torch.cuda.manual_seed(seed)
