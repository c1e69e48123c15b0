"""Islands: workers that keep weights of their own and meet the others every H steps.

The workers of a run are spread over islands in contiguous blocks; an island is a synchronous run with weights,
optimizer state and batch-norm statistics of its own. An island may span ranks, and a rank may host several islands:
the weights of one after another are then put under the one model, without a copy. Which rank hosts what changes
nothing.

References and equations: `bigstep.engine.methods.outer`. Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018
(`begin`: synchronous up to an epoch, islands from then on).
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
from bigstep.engine.methods.meeting import Meeting, Transport
from bigstep.engine.methods.outer import Outer
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.ranks import Ranks
from bigstep.engine.state import Carried, Count

__all__ = ["Islands"]

_BLEND = 0.5
"""What an island keeps of its own way when a meeting arrives late (Streaming DiLoCo's alpha)."""


class Islands:
    """The method of runs whose islands meet every so many steps.

    Args:
        config: How many, how often, and what an outer step does.
        learner: The model and optimizer that all islands of this rank take turns under.
        make_island: Makes the synchronous method of an island, given its number; called when islands begin.
        forwards: Of the islands that this rank hosts, by number.
        mainland: The synchronous method of all workers, up to `config.begin`; None if islands begin at once.
        transport: Brings islands together.
        add_up: Adds up what the islands hold, for a mean that does not depend on who hosts them.
        ranks: All ranks; `island_ranks` are those of this rank's island, `outer` those that meet.
        sampler: The order of samples.
        seed: Of the run.
        keeps: Say in the outcome of a step when what this rank holds is worth keeping.
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
        self.outer: Outer | None = None
        self.steps = 0
        """Taken since the islands parted."""
        self.travelling: dict[int, tuple[Meeting | Tensor, int]] = {}
        """By fragment, the mean that is on its way and the step that it is used at."""
        self.present: list[list[bool]] = []
        """By fragment, which islands were at its last meeting."""
        self.taken = 0
        """Steps of the run that these islands have computed."""
        self.ahead: dict[int, int] = {}
        """By island, the steps that it has computed where the run stands behind it, since a rank was lost."""
        self.unheard: list[int] = []
        """Islands whose losses of these steps are lost."""
        self.met = (0, 0, 0)
        """The last meeting that was held: its step, 1 for the last of a run, its fragment."""
        self.sent: dict[int, Tensor] = {}
        """By island, what its code would have missed in a meeting that could not be held."""
        self.skipped = Count()
        """Steps of any island that were dropped, as far as the last meeting has told."""
        self._waited_s = 0.0
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
        """Whether this rank is the first of its island, and so writes for it."""
        return self.islands[0].method.ranks.first

    @property
    def hosts_whole_islands(self) -> bool:
        """Whether no island of this rank has others too."""
        return all(island.method.ranks.size == 1 for island in self.islands)

    # ---- steps

    def requests(self, steps: Iterable[Step]) -> Iterator[Request]:
        """Yield one request a forward, island by island."""
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
        sent, waited_s = self._transport.bytes_sent, self._waited_s
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        data_s = exchange_s = bytes_sent = 0.0
        for island in self.islands:
            part = part_of(step, island.number, self.config.count)
            if part.size == 0:  # nothing is left of the epoch for it
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
        self.steps += 1
        self.taken = max(self.taken, step.position.step + 1)
        met = self._meet()
        bytes_sent += self._transport.bytes_sent - sent
        exchange_s += self._waited_s - waited_s
        loss *= self._missing(step)
        return Outcome(loss, data_s, exchange_s, bytes_sent, keep=self._keeps and (met or parting))

    def finish(self) -> None:
        """Meet a last time, so that all islands end with the same weights."""
        if self.mainland is not None:
            self.mainland.finish()
            return
        for island in self.islands:
            self.enter(island)
            island.method.finish()
        assert self.outer is not None
        for number in range(len(self.outer.fragments)):
            # a mean that is on its way arrives sooner than planned; what islands have done since it left counts too
            _, due = self.travelling.get(number, (None, 0))
            self._arrive(number, keep=_BLEND if due < self.steps + self.config.overlap else 0.0)
            self._hold(number, last=True)

    def _has_taken(self, island: int, step: Step) -> bool:
        """Whether an island has computed a step before the run came to it: a rank was lost since, not this island."""
        return step.position.step < self.ahead.get(island, 0)

    def _missing(self, step: Step) -> float:
        """What the loss of a step must be multiplied with, where that of some islands is not known any more."""
        lost = [number for number in self.unheard if self._has_taken(number, step)]
        known = step.size - sum(part_of(step, number, self.config.count).size for number in lost)
        return step.size / known if known else 1.0

    def _begins_later(self, step: Step) -> bool:
        return self._sampler.epochs_at(step.position) < self.config.begin

    # ---- meetings

    def _meet(self) -> bool:
        """Let fragments arrive and depart whose step it is; return whether the last of them has arrived."""
        assert self.outer is not None
        met = False
        every, fragments = self.config.every, len(self.outer.fragments)
        for number in range(fragments):
            if number in self.travelling and self.travelling[number][1] == self.steps:
                self._arrive(number, keep=_BLEND if self.config.overlap else 0.0)
                met = number == fragments - 1
            if (self.steps - number * every // fragments) % every == 0:
                if self.config.overlap:
                    self._depart(number)
                elif (self.steps, 0, number) <= self.met:  # held before a rank was lost
                    met = number == fragments - 1
                else:
                    met = self._hold(number) and number == fragments - 1
        return met

    def _hold(self, number: int, *, last: bool = False) -> bool:
        """Hold a meeting at once and return whether anybody came; if it fails, the islands stand as before it."""
        if last and (self.steps, 1, number) <= self.met:
            return True
        samples = [list(island.samples) for island in self.islands]
        owed = self._transport.owed(number, copy=self._keeps)
        try:
            self._depart(number, everybody=last)
            held = number in self.travelling
            self._arrive(number)
            if last and not held:  # nobody has moved since, but who had missed a meeting stands behind what was agreed
                self._hand_out(number)
        except Exception:  # whatever it was, it rises; but survivors keep what stands now, so nothing may be half done
            self.travelling.pop(number, None)
            self.sent = self._transport.owed(number, copy=True)
            self._transport.take_back(number, owed)
            for island, seen in zip(self.islands, samples, strict=True):
                island.samples = seen
            raise
        self.met = self.steps, int(last), number
        return held

    def _depart(self, number: int, *, everybody: bool = False) -> None:
        """Send off what the islands have moved in a fragment; `everybody` misses none."""
        assert self.outer is not None
        counts = self._samples_of_all(number)
        present = [everybody or not self._misses(number, island) for island in range(self.config.count)]
        self.present[number] = present
        total = sum(count for count, here in zip(counts, present, strict=True) if here)
        if not total:
            return
        here = {island.number: island.weights for island in self.islands}
        meeting = self.outer.start(number, here, lambda i: counts[i] / total if present[i] else 0.0)
        self.travelling[number] = meeting, self.steps + self.config.overlap
        for island in self.islands:
            if present[island.number]:
                island.samples[number] = 0

    def _arrive(self, number: int, keep: float = 0.0) -> None:
        """Take an outer step with the mean, and bring the islands that were there to the agreed weights."""
        if number not in self.travelling:
            return
        assert self.outer is not None
        meeting, _ = self.travelling.pop(number)
        with self._waiting():
            mean = meeting if isinstance(meeting, Tensor) else meeting.wait()
        self.outer.apply(number, mean)
        self._hand_out(number, keep)

    def _hand_out(self, number: int, keep: float = 0.0) -> None:
        assert self.outer is not None
        for island in self.islands:
            if self.present[number][island.number]:
                self.outer.hand_out(number, island.weights, keep)
                self.enter(island)
                island.method.passes.renew()

    def _samples_of_all(self, number: int) -> list[int]:
        """Count what each island has seen since it last met in a fragment; the same message tells what was dropped."""
        *counts, dropped = [0] * (self.config.count + 1)
        for island in self.islands:
            counts[island.number] = island.samples[number]
            dropped += island.method.skipped.value
            island.method.skipped.value = 0
        if self.outer_ranks.size > 1:
            told = torch.tensor([*counts, dropped], device=self.ranks.device)
            if told.is_cuda:
                torch.cuda.synchronize(told.device)  # what the islands still compute is no waiting for others
            with self._waiting():
                *counts, dropped = map(int, self.outer_ranks.sum_(told).tolist())
        self.skipped.value += dropped
        return counts

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count time as that of an exchange which computing does not hide."""
        begun = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - begun

    def _misses(self, number: int, island: int) -> bool:
        """Whether an island misses this meeting, by a draw that is the same on all ranks."""
        if not self.config.drop:
            return False
        seed = ((self._seed * 1_000_003 + self.steps) * 1_009 + number) * 1_009 + island
        return float(torch.rand((), generator=torch.Generator().manual_seed(seed))) < self.config.drop

    # ---- what is under the model

    def enter(self, island: Island) -> None:
        """Put an island's weights and optimizer state under the model."""
        for parameter, weight in zip(self.learner.model.parameters(), island.weights, strict=True):
            parameter.data = weight
        self.learner.optimizer.state = island.optimizer_state

    def part(self) -> None:
        """Begin: every island starts from what the mainland has, a copy each."""
        carried = self._leave_mainland()
        parameters = list(self.learner.model.parameters())
        start = [parameter.detach().clone() for parameter in parameters]
        self.outer = Outer(start, self.config.outer, self.config.fragments, self._transport)
        fragments = len(self.outer.fragments)
        self.present = [[True] * self.config.count for _ in range(fragments)]
        self.islands = []
        for number in self._forwards:
            weights = [parameter.data for parameter in parameters] if not self.islands else [w.clone() for w in start]
            island = Island(number, self._make_island(number), weights, samples=[0] * fragments)
            self.islands.append(island)
            self.fill(island, copy.deepcopy(carried) if self.islands[1:] else carried)

    def fill(self, island: Island, carried: Mapping[str, Any]) -> None:
        """Give an island what it carries besides its weights, and leave it under the model."""
        self.enter(island)
        for name, part in island.method.parts().items():
            if name != "model" and name in carried:
                part.load_state_dict(carried[name])
        island.optimizer_state = self.learner.optimizer.state  # type: ignore[assignment]  # a new one, if it was loaded

    def _leave_mainland(self) -> dict[str, Any]:
        """Let the mainland end; return what it carries, on every rank. Every rank must call this."""
        if self.mainland is None:
            return {}
        self.mainland.finish()
        parts = {name: part for name, part in self.mainland.parts().items() if name not in ("model", "skipped")}
        carried = {name: part.state_dict() for name, part in parts.items()}
        carried["exchange"] = self.ranks.from_first(carried["exchange"])  # what it owes, every island owes
        self.mainland.close()
        self.mainland = None
        return carried

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Lend out the mean of all islands: their weights, and the statistics of their batch norms."""
        if self.mainland is not None:
            with self.mainland.evaluation() as model:
                yield model
            return
        model = self.learner.model
        put_mean_under(model, self.islands, self.config.count, self._add_up)
        model.eval()
        try:
            yield model
        finally:
            model.train()
            self.enter(self.islands[0])

    def rehearse(self) -> None:
        """Run a forward and backward of the first island in the open."""
        (self.mainland or self.islands[0].method).rehearse()

    def parts(self) -> dict[str, Carried]:
        """The agreed weights as the model, and all that the islands carry."""
        return {"model": Agreed(self), "islands": IslandsState(self), "skipped": self.skipped}

    def close(self) -> None:
        """Let go of threads and connections."""
        for method in [island.method for island in self.islands] + ([self.mainland] if self.mainland else []):
            method.close()
        self._transport.close()
