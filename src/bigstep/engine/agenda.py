"""What is due after which step: evaluations, checkpoints, decisions, the end. All of it follows from the position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bigstep.config import RunConfig
from bigstep.data.sampler import Position, Sampler, Step
from bigstep.engine.growth import Growth
from bigstep.engine.meter import Flush
from bigstep.engine.methods.base import Note

__all__ = ["Agenda", "Due"]


@dataclass(frozen=True)
class Due:
    """What is due after a step."""

    last: bool
    """Training ends."""
    evaluate: bool
    save: bool
    stops: bool = False
    """Training ends before the run does, which may be resumed from here later."""
    decide: bool = False
    """The batch of the next steps is decided, from all that was measured so far."""

    @property
    def pausing(self) -> bool:
        """Whether something other than a step comes next, which needs the results of all steps so far."""
        return self.evaluate or self.save or self.decide


@dataclass(frozen=True)
class Agenda:
    """The plan of a run, the same on all ranks.

    Args:
        config: Says how often.
        sampler: Knows the steps.
        max_steps: Where to stop, counted from the beginning of the run; None for the end of the epochs.
        growth: Decides the batch during the run; None if it is known beforehand.
    """

    config: RunConfig
    sampler: Sampler
    max_steps: int | None = None
    growth: Growth | None = None

    def stretches(self, begin: Position) -> Iterator[list[Step]]:
        """Yield the steps from a position on, in lists that end with an epoch, or where the batch is decided."""
        while steps := self._stretch(begin):
            yield steps
            begin = self.sampler.after(steps[-1])

    def after(self, step: Step) -> Due:
        """Return what is due after a step."""
        position = self.sampler.after(step)
        ended = self.has_ended(position)
        stops = not ended and self._is_enough(position)
        return Due(
            ended or stops,
            evaluate=ended or stops or self._crossed(step, position, self.config.evaluate_every),
            save=ended or stops or self._crossed(step, position, self.config.checkpoint.every),
            stops=stops,
            decide=not ended and self._decides(step, position),  # at max_steps too: a resumed run needs the decision
        )

    def has_ended(self, position: Position) -> bool:
        """Whether a run that stands here has seen all its samples."""
        return self.sampler.samples_at(position) >= self.config.epochs * self.sampler.size

    def heed(self, flush: Flush, due: Due) -> Iterable[Note]:
        """Take in the results of some steps, and decide the batch if that is due."""
        if self.growth is not None:
            self.growth.hear(flush)
            if due.decide:
                note = self.growth.decide(self.sampler.epochs_at(self.sampler.after(flush.step)))
                return [] if note is None else [note]
        return []

    def _stretch(self, begin: Position) -> list[Step]:
        steps: list[Step] = []
        for step in self.sampler.steps(self.config.epochs, begin):
            if step.position.epoch != begin.epoch or self._is_enough(step.position):
                break
            steps.append(step)
            if self._decides(step, self.sampler.after(step)):
                break
        return steps

    def _is_enough(self, position: Position) -> bool:
        """Whether no step may follow; a resumed run may already be past `max_steps`."""
        return self.max_steps is not None and position.step >= self.max_steps

    def _decides(self, step: Step, position: Position) -> bool:
        return self.growth is not None and self._crossed(step, position, self.growth.config.every)

    def _crossed(self, step: Step, position: Position, every: float) -> bool:
        """Whether a step went past a multiple of `every` epochs; 1e-9 forgives the rounding of fractions."""
        if not every:
            return False
        before, after = self.sampler.epochs_at(step.position), self.sampler.epochs_at(position)
        return math.floor(after / every + 1e-9) > math.floor(before / every + 1e-9)
