"""When islands meet, which of them, and what each gets; `Outer` says what a meeting does to the agreed weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bigstep.config import IslandsConfig
from bigstep.engine.methods.island import Island
from bigstep.engine.methods.meeting import Meeting, Transport
from bigstep.engine.methods.outer import Outer
from bigstep.engine.ranks import Ranks
from bigstep.engine.state import Count

__all__ = ["Rounds"]

_BLEND = 0.5
"""The weight of an island's own weights when a mean arrives with delay (Streaming DiLoCo's alpha)."""


class Rounds:
    """The meetings of islands, fragment by fragment.

    Args:
        config: How many islands there are, how often they meet, and how many miss a meeting.
        islands: Those of this rank.
        outer: The agreed weights, and the rule that moves them.
        transport: Carries what islands send.
        ranks: Those that meet.
        skipped: Counts the steps that islands have dropped, as meetings report them.
        renew: Called with an island whose weights a meeting has changed.
        seed: Of the run.
        keeps: Whether a meeting that fails must leave everything as it was, since surviving ranks save it.
    """

    def __init__(
        self,
        config: IslandsConfig,
        islands: Sequence[Island],
        outer: Outer,
        transport: Transport,
        ranks: Ranks,
        skipped: Count,
        renew: Callable[[Island], None],
        seed: int,
        *,
        keeps: bool,
    ):
        self.config, self.islands, self.outer, self._transport = config, islands, outer, transport
        self._ranks, self._skipped, self._renew, self._seed, self._keeps = ranks, skipped, renew, seed, keeps
        self.steps = 0
        """Taken since the islands began."""
        self.travelling: dict[int, tuple[Meeting | Tensor, int]] = {}
        """By fragment, the mean that is under way and the step at which it is used."""
        self.present = [[True] * config.count for _ in outer.fragments]
        """By fragment, which islands were at its last meeting."""
        self.met = (0, 0, 0)
        """The last meeting that was held: its step, 1 if it was the final one of a run, its fragment."""
        self.sent: dict[int, Tensor] = {}
        """By island, its residual after it was encoded for a meeting that then failed."""
        self.waited_s = 0.0
        """Seconds spent waiting for other islands."""

    def after_step(self) -> bool:
        """Let the fragments that are due arrive and depart; return whether the last fragment has arrived."""
        self.steps += 1
        met = False
        every, fragments = self.config.every, len(self.outer.fragments)
        for number in range(fragments):
            if number in self.travelling and self.travelling[number][1] == self.steps:
                self._arrive(number, keep=_BLEND if self.config.overlap else 0.0)
                met = number == fragments - 1
            if (self.steps - number * every // fragments) % every == 0:
                if self.config.overlap:
                    self._depart(number)
                elif (self.steps, 0, number) <= self.met:  # was held before a rank was lost
                    met = number == fragments - 1
                else:
                    met = self._hold(number) and number == fragments - 1
        return met

    def finish(self) -> None:
        """Hold a last meeting in every fragment, so that all islands end with the same weights."""
        for number in range(len(self.outer.fragments)):
            # a mean under way arrives sooner than planned; what islands have done since it departed counts too
            _, due = self.travelling.get(number, (None, 0))
            self._arrive(number, keep=_BLEND if due < self.steps + self.config.overlap else 0.0)
            self._hold(number, last=True)

    def _hold(self, number: int, *, last: bool = False) -> bool:
        """Hold a meeting at once and return whether any island took part; if it fails, islands stay as they were."""
        if last and (self.steps, 1, number) <= self.met:
            return True
        samples = [list(island.samples) for island in self.islands]
        owed = self._transport.owed(number, copy=self._keeps)
        try:
            self._depart(number, everybody=last)
            held = number in self.travelling
            self._arrive(number)
            if last and not held:  # no island has moved since, but one that missed a meeting lacks the agreed weights
                self._hand_out(number)
        except Exception:  # raised again; but surviving ranks save the present state, so nothing may be half done
            self.travelling.pop(number, None)
            self.sent = self._transport.owed(number, copy=True)
            self._transport.take_back(number, owed)
            for island, seen in zip(self.islands, samples, strict=True):
                island.samples = seen
            raise
        self.met = self.steps, int(last), number
        return held

    def _depart(self, number: int, *, everybody: bool = False) -> None:
        """Send off what the islands have moved in a fragment; with `everybody` none misses the meeting."""
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
        """Take an outer step with the mean, and bring the islands that took part to the agreed weights."""
        if number not in self.travelling:
            return
        meeting, _ = self.travelling.pop(number)
        with self._waiting():
            mean = meeting if isinstance(meeting, Tensor) else meeting.wait()
        self.outer.apply(number, mean)
        self._hand_out(number, keep)

    def _hand_out(self, number: int, keep: float = 0.0) -> None:
        for island in self.islands:
            if self.present[number][island.number]:
                self.outer.hand_out(number, island.weights, keep)
                self._renew(island)

    def _samples_of_all(self, number: int) -> list[int]:
        """Count the samples of each island since its last meeting in a fragment; also add up the dropped steps."""
        *counts, dropped = [0] * (self.config.count + 1)
        for island in self.islands:
            counts[island.number] = island.samples[number]
            dropped += island.method.skipped.value
            island.method.skipped.value = 0
        if self._ranks.size > 1:
            told = torch.tensor([*counts, dropped], device=self._ranks.device)
            if told.is_cuda:
                # what the islands still compute must not count as waiting for others; another mean may stay under way
                torch.cuda.current_stream(told.device).synchronize()
            with self._waiting():
                *counts, dropped = map(int, self._ranks.sum_(told).tolist())
        self._skipped.value += dropped
        return counts

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count time as exchange that no computation hides."""
        begun = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - begun

    def _misses(self, number: int, island: int) -> bool:
        """Whether an island misses this meeting, by a random draw that is the same on all ranks."""
        if not self.config.drop:
            return False
        seed = ((self._seed * 1_000_003 + self.steps) * 1_009 + number) * 1_009 + island
        return float(torch.rand((), generator=torch.Generator().manual_seed(seed))) < self.config.drop
