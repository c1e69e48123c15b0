"""A suite of your own, from YAML: a list of runs, each with recipe, preset, settings and seeds."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from bigstep import recipes
from bigstep.bench.planned import Planned
from bigstep.bench.suites import Options, refuse_seed
from bigstep.config.edit import flatten
from bigstep.config.text import read_yaml
from bigstep.config.trust import CODE, require_trust
from bigstep.errors import ConfigError
from bigstep.validate import Positive, Range, WholeNotNegative, build, check_ranges, require_name

__all__ = ["EXAMPLE", "read_suite"]

EXAMPLE = """\
# bigstep bench mine.yaml
- {recipe: plain, epochs: 4, seeds: 3}
- {recipe: plain, name: ten times the rate, epochs: 4, seeds: 3, set: {lr.base: 2.0}}
- {recipe: sony, epochs: 4, seeds: 3, procs: 2, finish_on_one: 1}
"""

Seeds = Annotated[int, Range(lambda seeds: 0 < seeds <= 1_000, "be 1 to 1,000")]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of a suite: runs that differ in the seed only."""

    recipe: str
    name: str = ""
    preset: str = ""
    set: dict = field(default_factory=dict)  # type: ignore[type-arg]  # values of any kind, by path
    seeds: Seeds = 3
    epochs: Positive | None = None
    procs: WholeNotNegative = 0
    finish_on_one: Positive | None = None


def read_suite(file: Path, options: Options) -> list[Planned]:
    """Return the runs that a file lists; `options` decide what it leaves open.

    Raises:
        ConfigError: One sentence that names the entry and what is wrong with it.
    """
    entries = read_yaml(file)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"The suite {file} must hold a list of runs, each with at least `recipe:`.")
    runs: list[Planned] = []
    for number, entry in enumerate(entries, start=1):
        try:
            runs += _runs_of(entry, options)
        except ConfigError as error:
            raise ConfigError(f"{file}, run {number}: {error}") from None
    (twice, times), *_ = Counter(run.name for run in runs).most_common(1)
    if times > 1:
        raise ConfigError(f"Two runs of {file} would be called {twice}; give one of them another `name:`.")
    return sorted(runs, key=lambda run: run.seed)  # seed by seed, so that an interrupted suite has whole comparisons


def _runs_of(given: Any, options: Options) -> list[Planned]:
    entry = build(Entry, given, whole="an entry of a suite")
    check_ranges(entry)
    require_name(entry.recipe, recipes.known(), "recipe")
    seeds = options.seeds or (1 if options.quick else entry.seeds)
    run = Planned(
        label=entry.name or entry.recipe,
        recipe=entry.recipe,
        preset=entry.preset or options.preset,
        settings=(*(_setting(path, value) for path, value in entry.set.items()), *options.settings),
        epochs=options.epochs or entry.epochs,
        finish_on_one=entry.finish_on_one,
        procs=1 if entry.recipe in recipes.ASYNCHRONOUS else entry.procs or options.procs,
    )
    refuse_seed(run.settings)
    run.config()  # a mistake is reported before anything starts
    named = [str(value) for path, value in flatten(entry.set) if path in CODE]
    require_trust(named, "it", trusted=options.trust)
    return [dataclasses.replace(run, seed=seed) for seed in range(seeds)]


def _setting(path: Any, value: Any) -> str:
    try:
        return f"{path}={json.dumps(value)}"
    except TypeError:  # YAML has dates
        raise ConfigError(f"set has {path}: {value!s:.60}, which no field takes.") from None
