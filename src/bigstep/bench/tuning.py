"""Equal tuning for all: the same number of trials for each recipe, judged on images held out of training.

The test set is never looked at: a trial trains with `data.holdout` and is evaluated on what was held out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigstep import recipes
from bigstep.bench.planned import Planned
from bigstep.config.edit import flatten
from bigstep.errors import ConfigError

__all__ = ["HOLDOUT", "SPACES", "Axis", "choose", "trials_of"]

HOLDOUT = 1 / 6
"""Share of the training set: 2,000 of the 12,000 embedded images."""


@dataclass(frozen=True)
class Axis:
    """A setting to try, as multiples of the recipe's own value, nearest first."""

    field: str
    factors: tuple[float, ...]


RATE = Axis("lr.base", (1.0, 0.5, 2.0, 0.25, 4.0))
DECAY = Axis("optimizer.weight_decay", (1.0, 4.0, 0.25))

SPACES: dict[str, tuple[Axis, ...]] = {
    **dict.fromkeys(recipes.NAMES, (RATE, DECAY)),
    **dict.fromkeys(recipes.HUGE, (RATE, Axis("optimizer.rest_lr", (1.0, 4.0, 0.25)))),  # filters are renormalised
    "pfn": (RATE, Axis("optimizer.rms_lr", (1.0, 3.0, 1 / 3))),  # its first epochs run on RMSprop's rate
}
"""15 points per recipe: the rate, and the next most important setting of its optimizer."""


def trials_of(run: Planned, trials: int) -> list[Planned]:
    """Return the trials of one recipe, its own setting first, then others in order of distance from it.

    >>> [trial.settings[:2] for trial in trials_of(Planned(label="plain", recipe="plain"), 3)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('lr.base=0.2', 'optimizer.weight_decay=0.002'), ('lr.base=0.2', 'optimizer.weight_decay=0.008'),
     ('lr.base=0.1', 'optimizer.weight_decay=0.002')]
    """
    axes = SPACES[run.recipe]
    points = list(itertools.product(*(range(len(axis.factors)) for axis in axes)))
    if not 0 < trials <= len(points):
        raise ConfigError(
            f"--tune is {trials}, but the search spaces hold {len(points)} points; ask for 1 to that many."
        )
    own = dict(flatten(dataclasses.asdict(run.config())))
    found = []
    for number, point in enumerate(sorted(points, key=lambda point: (sum(point), point))[:trials]):
        values = [
            f"{axis.field}={own[axis.field] * axis.factors[index]:.6g}" for axis, index in zip(axes, point, strict=True)
        ]
        found.append(
            dataclasses.replace(
                run,
                label=run.recipe,
                variant=f"trial {number}",
                settings=(*values, *run.settings, f"data.holdout={HOLDOUT:.6g}"),
            )
        )
    return found


def choose(trials: Sequence[Planned], accuracies: Mapping[str, float]) -> tuple[str, ...]:
    """Return the settings of the best trial, or the recipe's own if no trial has an accuracy.

    Args:
        trials: Of one recipe, as `trials_of` made them.
        accuracies: On the held-out images, by the name of the trial; failed ones are missing.
    """
    best = max(trials, key=lambda trial: accuracies.get(trial.name, -1.0))  # of equals the first: nearest its own
    return best.settings[: len(SPACES[best.recipe])]
