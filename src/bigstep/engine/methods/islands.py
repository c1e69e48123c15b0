"""Islands: workers that keep weights of their own and meet the others every H steps.

The workers of a run are spread over islands in contiguous blocks; an island is a synchronous run with weights,
optimizer state and batch-norm statistics of its own. An island may span ranks, and a rank may host several islands:
their weights are then put under the one model in turn, without a copy. The result does not depend on which rank hosts
which island.

References and equations: `bigstep.engine.methods.outer`. Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018
(`begin`: synchronous up to an epoch, islands from then on).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bigstep.config import IslandsConfig
from bigstep.data.feed import Request
from bigstep.data.sampler import Sampler, Step
from bigstep.engine.exact import ExactSum
from bigstep.engine.learner import Learner
from bigstep.engine.measures import on_grid
from bigstep.engine.methods.base import Batches, Outcome
from bigstep.engine.methods.forwards import Forwards
from bigstep.engine.methods.island import Island, part_of
from bigstep.engine.methods.islands_mean import put_mean_under
from bigstep.engine.methods.islands_state import Agreed, IslandsState
from bigstep.engine.methods.meeting import Transport
from bigstep.engine.methods.outer import Outer
from bigstep.engine.methods.rounds import Rounds
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.ranks import Ranks
from bigstep.engine.state import Carried, Count
from bigstep.norm import other_buffers

__all__ = ["Islands"]


class Islands:
    """The method of runs whose islands meet every so many steps.

    Args:
        config: How many, how often, and what an outer step does.
        learner: The model and optimizer that all islands of this rank use in turn.
        make_island: Makes the synchronous method of an island, given its number; called when islands begin.
        forwards: Those of the islands that this rank hosts, by number.
        mainland: The synchronous method of all workers, up to `config.begin`; None if islands begin at once.
        transport: Carries what islands send to their meetings.
        add_up: Adds up what the islands hold, for a mean that does not depend on who hosts them.
        ranks: All ranks.
        outer: The ranks that meet: one of each island, or all if a rank hosts whole islands.
        sampler: The order of samples.
        seed: Of the run.
        keeps: Ask in the outcome of a step to save what this rank holds, whenever islands have met.
    """

    def __init__(
        self,
        config: IslandsConfig,
        learner: Learner,
        make_island: Callable[[int], Synchronous],
        forwards: Mapping[int, Forwards],
        mainland: Synchronous | None,
        transport: Transport,
        add_up: ExactSum,
        ranks: Ranks,
        outer: Ranks,
        sampler: Sampler,
        seed: int,
        *,
        keeps: bool = False,
    ):
        self.config, self.learner, self._make_island, self._forwards = config, learner, make_island, dict(forwards)
        self.mainland, self._transport, self.ranks, self.outer_ranks = mainland, transport, ranks, outer
        self._sampler, self._seed, self._add_up, self._keeps = sampler, seed, add_up, keeps
        self.islands: list[Island] = []
        self.rounds: Rounds | None = None
        """Their meetings, once the islands have begun."""
        self.taken = 0
        """Steps of the run that these islands have computed."""
        self.ahead: dict[int, int] = {}
        """By island, the steps it has computed if it is ahead of the run: it was resumed after a rank was lost."""
        self.unheard: list[int] = []
        """Islands whose losses of these steps are lost."""
        self.skipped = Count()
        """Steps of any island that were dropped, up to the last meeting."""
        if mainland is None:
            self.part()
        else:
            mainland.skipped = self.skipped

    @property
    def hosted(self) -> tuple[int, ...]:
        """The numbers of the islands of this rank."""
        return tuple(self._forwards)

    @property
    def first_of_island(self) -> bool:
        """Whether this rank is the first of its island, and so writes files for it."""
        return self.islands[0].method.ranks.first

    @property
    def hosts_whole_islands(self) -> bool:
        """Whether no island of this rank spans other ranks too."""
        return all(island.method.ranks.size == 1 for island in self.islands)

    # ---- steps

    def requests(self, steps: Iterable[Step]) -> Iterator[Request]:
        """Yield one request per forward, island by island."""
        for step in steps:
            if self._begins_later(step):
                assert self.mainland is not None
                yield from self.mainland.requests([step])
                continue
            for number, forwards in self._forwards.items():
                if self._has_taken(number, step):
                    continue
                yield from forwards.requests([part_of(step, number, self.config.count)], cut=lambda _: False)

    def step(self, step: Step, batches: Batches) -> Outcome:
        """Let each island of this rank take its step; then meet, if it is time."""
        if self._begins_later(step):
            assert self.mainland is not None
            return self.mainland.step(step, batches)
        parting = self.mainland is not None
        if parting:
            self.part()
        assert self.rounds is not None
        self.taken = max(self.taken, step.position.step)  # earlier steps: by the mainland, or before a resume
        sent, waited_s = self._transport.bytes_sent, self.rounds.waited_s
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        data_s = exchange_s = bytes_sent = 0.0
        for island in self.islands:
            part = part_of(step, island.number, self.config.count)
            if part.size == 0:  # an incomplete batch leaves it no samples
                continue
            if self._has_taken(island.number, step):
                loss += island.losses.get(step.position.step + 1, 0.0)
                continue
            self.enter(island)
            island.method.first_worker = part.first_worker
            outcome = island.method.step(part, batches)
            island.samples = [seen + part.size for seen in island.samples]
            own_loss = on_grid(outcome.loss * (part.size / step.size))
            if self._keeps:
                island.remember(step.position.step + 1, own_loss)
            loss += own_loss
            data_s, exchange_s = data_s + outcome.data_s, exchange_s + outcome.exchange_s
            bytes_sent += outcome.bytes_sent
        self.taken = max(self.taken, step.position.step + 1)
        met = self.rounds.after_step()
        bytes_sent += self._transport.bytes_sent - sent
        exchange_s += self.rounds.waited_s - waited_s
        loss *= self._missing(step)
        return Outcome(loss, data_s, exchange_s, bytes_sent, keep=self._keeps and (met or parting))

    def finish(self) -> None:
        """Hold a last meeting, so that all islands end with the same weights."""
        if self.mainland is not None:
            self.mainland.finish()
            return
        for island in self.islands:
            self.enter(island)
            island.method.finish()
        assert self.rounds is not None
        self.rounds.finish()

    def _has_taken(self, island: int, step: Step) -> bool:
        """Whether an island had computed a step that the run repeats, since another island's rank was lost."""
        return step.position.step < self.ahead.get(island, 0)

    def _missing(self, step: Step) -> float:
        """Return the factor that corrects the loss of a step for islands whose part of it is lost."""
        lost = [number for number in self.unheard if self._has_taken(number, step)]
        known = step.size - sum(part_of(step, number, self.config.count).size for number in lost)
        return step.size / known if known else 1.0

    def _begins_later(self, step: Step) -> bool:
        return self._sampler.epochs_at(step.position) < self.config.begin

    # ---- what is under the model

    def enter(self, island: Island) -> None:
        """Put an island's weights and optimizer state under the model."""
        for parameter, weight in zip(self.learner.model.parameters(), island.weights, strict=True):
            parameter.data = weight
        self.learner.optimizer.state = island.optimizer_state

    def _renew(self, island: Island) -> None:
        self.enter(island)
        island.method.passes.renew()

    def part(self) -> None:
        """Begin the islands, each from a copy of what the mainland has."""
        carried = self._leave_mainland()
        parameters = list(self.learner.model.parameters())
        start = [parameter.detach().clone() for parameter in parameters]
        outer = Outer(start, self.config.outer, self.config.fragments, self._transport)
        self.islands = []
        for number in self._forwards:
            weights = [parameter.data for parameter in parameters] if not self.islands else [w.clone() for w in start]
            island = Island(number, self._make_island(number), weights, samples=[0] * len(outer.fragments))
            self.islands.append(island)
            self.fill(island, copy.deepcopy(carried) if self.islands[1:] else carried)
        self.rounds = Rounds(
            self.config,
            self.islands,
            outer,
            self._transport,
            self.outer_ranks,
            self.skipped,
            self._renew,
            self._seed,
            keeps=self._keeps,
        )

    def fill(self, island: Island, carried: Mapping[str, Any]) -> None:
        """Load what an island carries besides its weights, and leave it under the model."""
        self.enter(island)
        for name, part in island.method.parts().items():
            if name != "model" and name in carried:
                part.load_state_dict(carried[name])
        island.optimizer_state = self.learner.optimizer.state  # type: ignore[assignment]  # loading makes a new one

    def _leave_mainland(self) -> dict[str, Any]:
        """End the mainland and return what it carries, on every rank; every rank must call this."""
        if self.mainland is None:
            return {}
        self.mainland.finish()
        parts = {name: part for name, part in self.mainland.parts().items() if name not in ("model", "skipped")}
        carried = {name: part.state_dict() for name, part in parts.items()}
        for name in ("statistics", "exchange"):  # rank 0 has put them together
            carried[name] = self.ranks.from_first(carried[name])  # every island owes what the mainland owed
        self.mainland.close()
        self.mainland = None
        return carried

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Lend out the mean of all islands: their weights, and the statistics of their batch norms.

        Other buffers of the network are taken from rank 0, as in a synchronous run.
        """
        if self.mainland is not None:
            with self.mainland.evaluation() as model:
                yield model
            return
        model = self.learner.model
        put_mean_under(model, self.islands, self.config.count, self._add_up)
        self.ranks.take_first_(other_buffers(model))
        model.eval()
        try:
            yield model
        finally:
            model.train()
            self.enter(self.islands[0])

    def rehearse(self) -> None:
        """Run a forward and backward of the first island outside graphs."""
        (self.mainland or self.islands[0].method).rehearse()

    def parts(self) -> dict[str, Carried]:
        """Return the mean of all islands as the model, and all that the islands carry."""
        return {"model": Agreed(self), "islands": IslandsState(self), "skipped": self.skipped}

    def close(self) -> None:
        """Let go of threads and connections."""
        for method in [island.method for island in self.islands] + ([self.mainland] if self.mainland else []):
            method.close()
        self._transport.close()
