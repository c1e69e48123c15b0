"""Systems with one technique left out, for ablations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from bigstep import recipes
from bigstep.config.edit import stretch


def without(
    recipe: str,
    preset: str,
    constant: Sequence[str],
    rate_of: Callable[[str], Sequence[str]],
    epochs: float | None = None,
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield names of techniques, and settings that leave each out of a system by itself.

    Args:
        recipe: The system.
        preset: Of it, and of the system whose optimizer takes the place of its own.
        constant: Workers of a batch that does not grow.
        rate_of: Settings of another system's rate; nothing where it is not known.
        epochs: Of the run, where they are not those of the preset: the schedule is stretched to them.
    """
    config = recipes.load(recipe, preset)
    config = config if epochs is None else stretch(config, epochs)
    yield "label smoothing", ("loss.label_smoothing=0.0",)
    yield "batch-size control", ("plan=[]", *constant)
    other = "sony" if recipe == "leap" else "plain"
    rule = recipes.load(other, preset).optimizer
    fields = [f"optimizer.{name}={json.dumps(value)}" for name, value in vars(rule).items() if name != "name"]
    if rate := rate_of(other):  # another rule at the rate of this one would say nothing
        yield config.optimizer.name, (f"optimizer.name={rule.name}", *fields, *rate)
    pieces = [vars(piece) for piece in config.lr.schedule if piece.shape != "warmup"]
    yield "warm-up", (f"lr.schedule={json.dumps(pieces)}",)
    yield "last-batch statistics", ("norm.statistics=moving",)
