"""What comes after which step: evaluations, checkpoints, the end. All of it follows from the position alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from bigstep.config import RunConfig
from bigstep.data.sampler import Position, Sampler, Step

__all__ = ["Agenda", "Due"]


@dataclass(frozen=True)
class Due:
    """What is due behind a step."""

    last: bool
    """The run ends."""
    evaluate: bool
    save: bool

    @property
    def pausing(self) -> bool:
        """Something that is no step comes next."""
        return self.evaluate or self.save


@dataclass(frozen=True)
class Agenda:
    """The plan of a run, the same on all ranks.

    Args:
        config: Says how often.
        sampler: Knows the steps.
        max_steps: Where to stop, counted from the beginning of the run; None for the end of the epochs.
    """

    config: RunConfig
    sampler: Sampler
    max_steps: int | None = None

    def epochs(self, begin: Position) -> Iterator[list[Step]]:
        """Yield the steps from a position on, one list an epoch."""
        steps = self.sampler.steps(self.config.epochs, begin)
        if self.max_steps is not None:
            steps = itertools.takewhile(lambda step: step.position.step < (self.max_steps or 0), steps)
        for _, group in itertools.groupby(steps, key=lambda step: step.position.epoch):
            yield list(group)

    def after(self, step: Step) -> Due:
        """Return what is due behind a step."""
        position = self.sampler.after(step)
        seen, wanted = self.sampler.samples_at(position), self.config.epochs * self.sampler.size
        last = seen >= wanted or position.step == self.max_steps
        return Due(
            last,
            evaluate=last or self._crossed(step, position, self.config.evaluate_every),
            save=last or self._crossed(step, position, self.config.checkpoint.every),
        )

    def _crossed(self, step: Step, position: Position, every: float) -> bool:
        """Whether a step went past a multiple of `every` epochs; 1e-9 forgives the rounding of fractions."""
        if not every:
            return False
        before, after = self.sampler.epochs_at(step.position), self.sampler.epochs_at(position)
        return math.floor(after / every + 1e-9) > math.floor(before / every + 1e-9)
