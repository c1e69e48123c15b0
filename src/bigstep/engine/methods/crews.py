"""Stages with fewer workers than ranks: those that host a worker train, the others wait without exchanging anything.

The crew of a stage is the first ranks, as many as there are workers (at most all ranks). A crew exchanges gradients
among its members; a crew of one exchanges none. When the crew changes, the old one hands over what it carries just as a
checkpoint does; ranks that join also get weights and optimizer state. Waiting ranks get the weights for every
evaluation, and so at the end.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigstep.data.feed import Request
from bigstep.data.sampler import Step
from bigstep.engine.methods.base import Batches, Note, Outcome
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.ranks import Ranks
from bigstep.engine.state import Carried, Count, Weights
from bigstep.exchange.groups import borrow, offer
from bigstep.norm import other_buffers

__all__ = ["Crews", "MakeCrew", "Resting"]


class MakeCrew(Protocol):
    """Makes the method of a crew; every rank calls it."""

    def __call__(self, crew: Ranks, *, member: bool) -> Synchronous:
        """Return the method of these ranks, or that of a rank that waits for them and takes part in no collective."""


class Resting:
    """The pass of a rank that has no worker: nothing is computed, exchanged or updated.

    Args:
        device: That of the rank.
        gives_mean: The same as in the pass of the crew, since all ranks must measure noise in the same steps.
    """

    own_weight = 1.0
    loss_scale: Tensor | float = 1.0
    steady = True

    def __init__(self, device: torch.device, *, gives_mean: bool):
        self._device, self.gives_mean, self.counts = device, gives_mean, 1.0

    def add(self, inputs: Any, target: Any, weight: float, *, last: bool, keep: bool) -> Tensor:
        """Add nothing to the loss."""
        assert inputs is None, "a rank without workers has no samples"
        return torch.zeros((), device=self._device)

    def own_gradients(self) -> list[Tensor | None]:
        """There are none."""
        return []

    def gradients(self) -> list[Tensor | None]:
        """There are none."""
        return []

    def complete(self, step: Step, inputs: Any) -> bool:
        """There is no gradient that could be unusable."""
        return True

    def update(self) -> None:
        """Only the crew changes the weights."""

    def flush(self) -> None:
        """Nothing is in flight."""

    def ended(self) -> tuple[Note, ...]:
        """There is nothing to report."""
        return ()

    def traffic(self) -> tuple[float, float]:
        """Nothing is exchanged."""
        return 0.0, 0.0

    def guard(self) -> contextlib.AbstractContextManager[object]:
        """There is no exchange that could fail."""
        return contextlib.nullcontext()

    def renew(self) -> None:
        """Nothing is derived from the weights."""

    def rehearse(self) -> None:
        """There is nothing to run."""

    def parts(self) -> Mapping[str, Carried]:
        """Nothing is carried."""
        return {}

    def close(self) -> None:
        """Nothing is held."""


class Crews:
    """The method of a synchronous run that has a stage with fewer workers than ranks.

    Args:
        make: Makes the method of a crew.
        ranks: All of them; several.
        next_workers: Returns the number of workers in the next step.
    """

    def __init__(self, make: MakeCrew, ranks: Ranks, next_workers: Callable[[], int]):
        self._make, self.ranks, self._next_workers = make, ranks, next_workers
        self._groups: dict[int, Any] = {}
        self._sent = 0.0  # bytes sent outside steps and not reported yet
        self._skipped = Count()
        self.size = min(next_workers(), ranks.size)
        """How many ranks train at present."""
        self.method = self._made()
        """The method of the present crew, or that of a rank that waits for it."""

    @property
    def _model(self) -> nn.Module:
        return self.method.learner.model

    def requests(self, steps: Iterable[Step]) -> Iterator[Request]:
        """Yield one request per forward, whatever the crew: with several ranks no forward is cut."""
        return self.method.forwards.requests(steps, lambda _: False)

    def step(self, step: Step, batches: Batches) -> Outcome:
        """Let the crew of a step take it, after a change of crew if need be."""
        size = min(step.workers, self.ranks.size)
        if size != self.size:
            self._hand_over(size)
        outcome = self.method.step(step, batches)
        sent, self._sent = self._sent, 0.0
        return replace(outcome, bytes_sent=outcome.bytes_sent + sent)

    def finish(self) -> None:
        """Apply what the crew still has in flight."""
        self.method.finish()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Lend out the model, also to the ranks that wait, since they take part in the evaluation."""
        self.method.learner.statistics.synchronize(self.ranks.sum_)
        self.ranks.take_first_(other_buffers(self._model))
        if self.size < self.ranks.size:
            shared = self._from_first(self._model.state_dict())
            if self.ranks.rank >= self.size:
                self._model.load_state_dict(shared)
        self._model.eval()
        try:
            yield self._model
        finally:
            self._model.train()

    def rehearse(self) -> None:
        """Run a forward and backward outside graphs, for a profile."""
        self.method.rehearse()

    def parts(self) -> dict[str, Carried]:
        """What a crew carries is saved by the crew, the statistics by all ranks."""
        return {
            "model": Weights(self._model),
            "optimizer": self.method.learner.optimizer,
            "statistics": _Statistics(self),
            "scaler": _OfCrew(self, "scaler"),
            "exchange": _OfCrew(self, "exchange"),
            "skipped": self._skipped,
        }

    def close(self) -> None:
        """Close the exchange."""
        self.method.close()

    def stand(self) -> None:
        """Form the crew of the next step, handing nothing over: a checkpoint is about to be loaded."""
        size = min(self._next_workers(), self.ranks.size)
        if size != self.size:
            self._form(size)

    # ---- a change of the crew

    def _hand_over(self, size: int) -> None:
        """Form another crew and give it all that the present one carries; every rank takes part."""
        learner, joining = self.method.learner, range(self.size, size)
        own_share = learner.statistics.state_dict()  # stays on its rank
        given: dict[str, Any] = {name: part.state_dict() for name, part in self.method.passes.parts().items()}
        if joining:
            given |= {"model": self._model.state_dict(), "optimizer": learner.optimizer.state_dict()}
        given = self._from_first(given)
        self._form(size)
        if self.ranks.rank in joining:
            self._model.load_state_dict(given["model"])
            learner.optimizer.load_state_dict(given["optimizer"])
        self.method.learner.statistics.load_state_dict([own_share])
        for name, part in self.method.passes.parts().items():
            part.load_state_dict(given[name])
        self.method.passes.renew()

    def _from_first(self, value: Any) -> Any:
        """Return rank 0's value on all ranks, and count its bytes: the root of a tree sends it once per level."""
        if self.ranks.first:
            self._sent += _bytes_of(value) * (self.ranks.size - 1).bit_length()
        return self.ranks.from_first(value)

    def _form(self, size: int) -> None:
        self.method.close()
        self.size = size
        del self.method
        gc.collect()  # removes DDP's hooks on the weights
        self.method = self._made()

    def _made(self) -> Synchronous:
        crew = replace(self.ranks, size=self.size, group=self._group())
        method = self._make(crew, member=self.ranks.rank < self.size)
        method.skipped = self._skipped
        return method

    def _group(self) -> Any:
        if self.size == self.ranks.size:
            return self.ranks.group
        if self.size not in self._groups:
            everyone = range(self.ranks.size)
            purpose = f"a crew of {self.size}"
            lent = borrow(purpose, everyone, None, self.ranks.gather(offer(purpose, everyone, None)))
            # only members make the group: releases of torch differ in how they count a call that leaves a rank out
            member = self.ranks.rank < self.size
            self._groups[self.size] = lent.take(range(self.size)) if member else dist.GroupMember.NON_GROUP_MEMBER
        return self._groups[self.size]


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return sum(map(_bytes_of, children))


class _OfCrew:
    """What the pass of the present crew carries under a name; a waiting rank carries nothing."""

    def __init__(self, crews: Crews, name: str):
        self._crews, self._name = crews, name

    def _part(self) -> Carried | None:
        return self._crews.method.passes.parts().get(self._name)

    def state_dict(self) -> Any:
        part = self._part()
        return None if part is None else part.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._crews.stand()
        if (part := self._part()) is not None:
            part.load_state_dict(state)


class _Statistics:
    """Batch-norm statistics: the shares of all ranks, including those that wait."""

    def __init__(self, crews: Crews):
        self._crews = crews

    def state_dict(self) -> list[Any] | None:
        ranks = self._crews.ranks
        return ranks.to_first(self._crews.method.learner.statistics.state_dict(first=ranks.first))

    def load_state_dict(self, state: list[Any]) -> None:
        self._crews.stand()
        ranks = self._crews.ranks
        self._crews.method.learner.statistics.load_state_dict(state, ranks.rank, ranks.size)
