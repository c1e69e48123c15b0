"""What comes after which step: evaluations, checkpoints, decisions, the end. All of it follows from the position."""

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
    """What is due behind a step."""

    last: bool
    """The run ends."""
    evaluate: bool
    save: bool
    decide: bool = False
    """The batch of the next steps is decided, by all that was measured up to here."""

    @property
    def pausing(self) -> bool:
        """Something that is no step comes next, and asks for all that the steps gave."""
        return self.evaluate or self.save or self.decide


@dataclass(frozen=True)
class Agenda:
    """The plan of a run, the same on all ranks.

    Args:
        config: Says how often.
        sampler: Knows the steps.
        max_steps: Where to stop, counted from the beginning of the run; None for the end of the epochs.
        growth: Decides the batch on the way; None where it is known beforehand.
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
        """Return what is due behind a step."""
        position = self.sampler.after(step)
        seen, wanted = self.sampler.samples_at(position), self.config.epochs * self.sampler.size
        ended = seen >= wanted
        last = ended or self._is_enough(position)
        return Due(
            last,
            evaluate=last or self._crossed(step, position, self.config.evaluate_every),
            save=last or self._crossed(step, position, self.config.checkpoint.every),
            decide=not ended and self._decides(step, position),  # at max_steps too: a resumed run goes on with it
        )

    def heed(self, flush: Flush, due: Due) -> Iterable[Note]:
        """Take what some steps gave, and decide the batch where that is due."""
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
        return self.max_steps is not None and position.step >= self.max_steps

    def _decides(self, step: Step, position: Position) -> bool:
        return self.growth is not None and self._crossed(step, position, self.growth.config.every)

    def _crossed(self, step: Step, position: Position, every: float) -> bool:
        """Whether a step went past a multiple of `every` epochs; 1e-9 forgives the rounding of fractions."""
        if not every:
            return False
        before, after = self.sampler.epochs_at(step.position), self.sampler.epochs_at(position)
        return math.floor(after / every + 1e-9) > math.floor(before / every + 1e-9)
