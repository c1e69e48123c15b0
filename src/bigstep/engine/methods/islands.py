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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.config import IslandsConfig
from bigstep.data.feed import Request
from bigstep.data.sampler import Position, Sampler, Step, hosted_workers
from bigstep.engine.exact import ExactSum
from bigstep.engine.learner import Learner
from bigstep.engine.measures import on_grid
from bigstep.engine.methods.base import Batches, Outcome
from bigstep.engine.methods.forwards import Forwards
from bigstep.engine.methods.meeting import Meeting, Transport
from bigstep.engine.methods.outer import Outer
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.ranks import Ranks
from bigstep.engine.state import Carried, Count
from bigstep.norm.statistics import statistics_of, tracking_norms

__all__ = ["Island", "Islands", "Part", "part_of"]

_BLEND = 0.5
"""What an island keeps of its own way when a meeting arrives late (Streaming DiLoCo's alpha)."""


@dataclass
class Island:
    """One island that this rank hosts: a synchronous method, and what is put under the model when it computes."""

    number: int
    method: Synchronous
    weights: list[Tensor]
    optimizer_state: defaultdict[Tensor, Any] = field(default_factory=lambda: defaultdict(dict))
    samples: int = 0
    """Seen since the last meeting."""


@dataclass(frozen=True)
class Part(Step):
    """An island's part of a step: a step of its own workers, who have the shares that they have in the whole."""

    whole: Step
    first_worker: int
    """The number of its first worker among all."""

    @property
    def filled(self) -> float:
        """What the whole step counts: islands that average in every step take the synchronous one."""
        return self.whole.filled

    @property
    def active(self) -> int:
        """Workers of the island with samples in this step."""
        return min(self.workers, max(0, self.whole.active - self.first_worker))

    def share(self, worker: int) -> tuple[int, int]:
        """Return the positions of one of its workers."""
        return self.whole.share(self.first_worker + worker)


def part_of(step: Step, island: int, islands: int) -> Part:
    """Return an island's part of a step.

    >>> whole = Step(Position(offset=8), stop=24, workers=4, local_batch=4)
    >>> [(part.start, part.stop, part.workers, part.first_worker) for part in (part_of(whole, i, 2) for i in range(2))]
    [(8, 16, 2, 0), (16, 24, 2, 2)]
    """
    workers = hosted_workers(step.workers, island, islands)
    start, stop = step.share(workers.start)[0], step.share(workers.stop - 1)[1]
    place = Position(step.position.epoch, start, step.position.step)
    return Part(place, stop, len(workers), step.local_batch, step, workers.start)


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
    ):
        self.config, self.learner, self._make_island, self._forwards = config, learner, make_island, dict(forwards)
        self._mainland, self._transport, self._ranks, self._outer_ranks = mainland, transport, ranks, outer
        self._sampler, self._seed, self._add_up = sampler, seed, add_up
        self.islands: list[Island] = []
        self.outer: Outer | None = None
        self._steps = 0  # since the islands parted
        self._travelling: dict[int, tuple[Meeting | Tensor, int]] = {}  # fragment -> (mean, the step it is used at)
        self.skipped = Count()
        if mainland is None:
            self._part()

    # ---- steps

    def requests(self, steps: Iterable[Step]) -> Iterator[Request]:
        """Yield one request a forward, island by island."""
        for step in steps:
            if self._begins_later(step):
                assert self._mainland is not None
                yield from self._mainland.requests([step])
                continue
            for number, forwards in self._forwards.items():
                yield from forwards.requests([part_of(step, number, self.config.count)], cut=lambda _: False)

    def step(self, step: Step, batches: Batches) -> Outcome:
        """Let each island of this rank take its step; then meet, if it is time."""
        if self._begins_later(step):
            assert self._mainland is not None
            return self._mainland.step(step, batches)
        if self._mainland is not None:
            self._part()
        sent = self._transport.bytes_sent
        loss = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        data_s = exchange_s = bytes_sent = 0.0
        for island in self.islands:
            part = part_of(step, island.number, self.config.count)
            if part.size == 0:  # nothing is left of the epoch for it
                continue
            self._enter(island)
            island.method.first_worker = part.first_worker
            outcome = island.method.step(part, batches)
            island.samples += part.size
            loss += on_grid(outcome.loss * (part.size / step.size))
            data_s, exchange_s = data_s + outcome.data_s, exchange_s + outcome.exchange_s
            bytes_sent += outcome.bytes_sent
        self._steps += 1
        self._meet()
        return Outcome(loss, data_s, exchange_s, bytes_sent + self._transport.bytes_sent - sent)

    def finish(self) -> None:
        """Meet a last time, so that all islands end with the same weights."""
        if self._mainland is not None:
            self._mainland.finish()
            return
        for island in self.islands:
            self._enter(island)
            island.method.finish()
        assert self.outer is not None
        for number in range(len(self.outer.fragments)):
            self._arrive(number)
            self._depart(number, everybody=True)
            self._arrive(number, keep=0.0)

    def _begins_later(self, step: Step) -> bool:
        return self._sampler.epochs_at(step.position) < self.config.begin

    # ---- meetings

    def _meet(self) -> None:
        assert self.outer is not None
        every, fragments = self.config.every, len(self.outer.fragments)
        for number in range(fragments):
            if number in self._travelling and self._travelling[number][1] == self._steps:
                self._arrive(number, keep=_BLEND if self.config.overlap else 0.0)
            if (self._steps - number * every // fragments) % every == 0:
                self._depart(number)
                if not self.config.overlap:
                    self._arrive(number, keep=0.0)

    def _depart(self, number: int, *, everybody: bool = False) -> None:
        """Send off what the islands have moved in a fragment; `everybody` misses none."""
        assert self.outer is not None
        counts = self._samples_of_all()
        present = [everybody or not self._misses(number, island) for island in range(self.config.count)]
        total = sum(count for count, here in zip(counts, present, strict=True) if here)
        if not total:
            return
        here = {island.number: island.weights for island in self.islands}
        meeting = self.outer.start(number, here, lambda i: counts[i] / total if present[i] else 0.0)
        self._travelling[number] = meeting, self._steps + self.config.overlap
        self._present = present
        if number == len(self.outer.fragments) - 1:
            for island in self.islands:
                island.samples = 0

    def _arrive(self, number: int, keep: float = 0.0) -> None:
        """Take an outer step with the mean, and bring the islands that were there to the agreed weights."""
        if number not in self._travelling:
            return
        assert self.outer is not None
        meeting, _ = self._travelling.pop(number)
        self.outer.apply(number, meeting if isinstance(meeting, Tensor) else meeting.wait())
        for island in self.islands:
            if self._present[island.number]:
                self.outer.hand_out(number, island.weights, keep)
                self._enter(island)
                island.method.passes.renew()

    def _samples_of_all(self) -> list[int]:
        """Count what each island has seen since the last meeting."""
        counts = torch.zeros(self.config.count, dtype=torch.int64, device=self._ranks.device)
        for island in self.islands:
            counts[island.number] = island.samples
        return [int(count) for count in self._outer_ranks.sum_(counts).tolist()]

    def _misses(self, number: int, island: int) -> bool:
        """Whether an island misses this meeting, by a draw that is the same on all ranks."""
        if not self.config.drop:
            return False
        seed = ((self._seed * 1_000_003 + self._steps) * 1_009 + number) * 1_009 + island
        return float(torch.rand((), generator=torch.Generator().manual_seed(seed))) < self.config.drop

    # ---- what is under the model

    def _enter(self, island: Island) -> None:
        """Put an island's weights and optimizer state under the model."""
        for parameter, weight in zip(self.learner.model.parameters(), island.weights, strict=True):
            parameter.data = weight
        self.learner.optimizer.state = island.optimizer_state

    def _part(self) -> None:
        """Begin: every island starts from the weights, optimizer state and statistics that the mainland has."""
        state = self._mainland_state()
        if self._mainland is not None:
            self._mainland.close()
            self._mainland = None
        parameters = list(self.learner.model.parameters())
        start = [parameter.detach().clone() for parameter in parameters]
        self.islands = []
        for number in self._forwards:
            weights = [parameter.data for parameter in parameters] if not self.islands else [w.clone() for w in start]
            island = Island(number, self._make_island(number), weights)
            self.islands.append(island)
            self._enter(island)
            if state is not None:
                optimizer, statistics = state
                self.learner.optimizer.load_state_dict(optimizer)
                island.method.learner.statistics.load_state_dict(
                    [statistics], island.method.ranks.rank, island.method.ranks.size
                )
        self.outer = Outer(start, self.config.outer, self.config.fragments, self._transport)
        self._present = [True] * self.config.count

    def _mainland_state(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if self._mainland is None:
            return None
        shares = self._ranks.gather(self._mainland.learner.statistics.state_dict())
        whole = {**shares[0], "share": torch.stack([share["share"] for share in shares]).sum(0)}
        optimizer = self.learner.optimizer.state_dict()
        copied = {**optimizer, "state": {k: _copied(v) for k, v in optimizer["state"].items()}}
        return copied, whole

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """Lend out the mean of all islands: their weights, and the statistics of their batch norms."""
        if self._mainland is not None:
            with self._mainland.evaluation() as model:
                yield model
            return
        model, count = self.learner.model, self.config.count
        norms = statistics_of(tracking_norms(model))
        carried: list[Tensor] = []
        for island in self.islands:
            island.method.learner.statistics.synchronize(island.method.ranks.sum_)
            carried.append(torch.cat([each.detach().reshape(-1) for each in (*island.weights, *norms)]))
        shapes = [each.shape for each in (*self.islands[0].weights, *norms)]
        mean = self._add_up(carried, shapes) / count
        pieces = mean.split_with_sizes([shape.numel() for shape in shapes])
        for parameter, piece in zip(model.parameters(), pieces[: len(shapes) - len(norms)], strict=True):
            parameter.data = piece.view(parameter.shape)
        for buffer, piece in zip(norms, pieces[len(shapes) - len(norms) :], strict=True):
            buffer.copy_(piece)
        model.eval()
        try:
            yield model
        finally:
            model.train()
            self._enter(self.islands[0])

    def rehearse(self) -> None:
        """Run a forward and backward of the first island in the open."""
        (self._mainland or self.islands[0].method).rehearse()

    # ---- state

    def parts(self) -> dict[str, Carried]:
        """The agreed weights as the model, and all that the islands carry."""
        return {"model": _Agreed(self), "islands": self, "skipped": self.skipped}

    def state_dict(self) -> dict[str, Any]:
        """Collect what every island carries; every rank must call this."""
        if self._mainland is not None:
            return {"mainland": {name: part.state_dict() for name, part in self._mainland.parts().items()}}
        assert self.outer is not None
        mine = {}
        for island in self.islands:
            self._enter(island)
            carried = {name: part.state_dict() for name, part in island.method.parts().items() if name != "model"}
            mine[str(island.number)] = {"weights": island.weights, "samples": island.samples, **carried}
        islands = {name: state for states in self._outer_ranks.gather(mine) for name, state in states.items()}
        travelling = {
            str(n): {"mean": m if isinstance(m, Tensor) else m.wait(), "at": at}
            for n, (m, at) in self._travelling.items()
        }
        return {
            "steps": self._steps,
            "islands": islands,
            "outer": self.outer.state_dict(),
            "travelling": travelling,
            "present": self._present,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, whichever ranks host the islands now."""
        if "mainland" in state:
            assert self._mainland is not None
            for name, part in self._mainland.parts().items():
                if name in state["mainland"]:
                    part.load_state_dict(state["mainland"][name])
            return
        if self._mainland is not None:
            self._part()
        assert self.outer is not None
        self._steps, self._present = state["steps"], list(state["present"])
        for island in self.islands:
            saved = state["islands"][str(island.number)]
            self._enter(island)
            for weight, value in zip(island.weights, saved["weights"], strict=True):
                weight.copy_(value)
            island.samples = saved["samples"]
            for name, part in island.method.parts().items():
                if name != "model" and name in saved:
                    part.load_state_dict(saved[name])
            island.method.passes.renew()
            island.optimizer_state = self.learner.optimizer.state  # type: ignore[assignment]  # torch types it loosely
        self.outer.load_state_dict(state["outer"])
        self._travelling = {
            int(n): (each["mean"].to(self._ranks.device), each["at"]) for n, each in state["travelling"].items()
        }

    def close(self) -> None:
        """Let go of threads and connections."""
        for method in [island.method for island in self.islands] + ([self._mainland] if self._mainland else []):
            method.close()
        self._transport.close()


class _Agreed:
    """The network as a whole: what an evaluation sees, by name."""

    def __init__(self, islands: Islands):
        self._islands = islands

    def state_dict(self) -> dict[str, Tensor]:
        with self._islands.evaluation() as model:
            return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What islands carry themselves is loaded by them; buffers that no island has are taken from here."""
        names = {name for name, _ in self._islands.learner.model.named_parameters()}
        buffers = {name: value for name, value in state.items() if name not in names}
        self._islands.learner.model.load_state_dict(buffers, strict=False)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, dict) else value
