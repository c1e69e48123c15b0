"""A suite of one's own, from YAML: a list of runs, each with recipe, preset, settings and seeds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from bigstep import recipes
from bigstep.bench.planned import Planned
from bigstep.bench.suites import Options
from bigstep.errors import ConfigError, nearest

__all__ = ["EXAMPLE", "read_suite"]

EXAMPLE = """\
# bigstep bench mine.yaml
- {recipe: plain, epochs: 4, seeds: 3}
- {recipe: plain, name: ten times the rate, epochs: 4, seeds: 3, set: {lr.base: 2.0}}
- {recipe: sony, epochs: 4, seeds: 3, procs: 2, finish_on_one: 1}
"""

FIELDS: dict[str, tuple[type, ...]] = {
    "recipe": (str,), "name": (str,), "preset": (str,), "set": (dict,), "seeds": (int,), "epochs": (int, float),
    "procs": (int,), "finish_on_one": (int, float),
}  # fmt: skip


def read_suite(file: Path, options: Options) -> list[Planned]:
    """Return the runs that a file lists; what it leaves open is as `options` say.

    Raises:
        ConfigError: One sentence that names the entry and what is wrong with it.
    """
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The suite {file} cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError):
        raise ConfigError(f"The suite {file} is not valid YAML; it holds a list of runs, each with a recipe.") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"The suite {file} must hold a list of runs, each with at least `recipe:`.")
    runs: list[Planned] = []
    for number, entry in enumerate(entries, start=1):
        runs += _runs_of(entry, f"{file}, run {number}", options)
    names = [run.name for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(f"Two runs of {file} would be called {twice}; give one of them another `name:`.")
    return sorted(runs, key=lambda run: run.seed)  # whole comparisons first


def _runs_of(entry: Any, where: str, options: Options) -> list[Planned]:
    if not isinstance(entry, dict) or "recipe" not in entry:
        raise ConfigError(f"{where} must be a mapping with `recipe:` (got {entry!r:.60}).")
    for key, value in entry.items():
        if key not in FIELDS:
            raise ConfigError(f"{where} has the unknown field {key!r}: {nearest(str(key), FIELDS)}")
        if not isinstance(value, FIELDS[key]) or isinstance(value, bool):
            raise ConfigError(f"{where}: {key} takes {FIELDS[key][-1].__name__} (got {value!r:.60}).")
    recipe = entry["recipe"]
    if recipe not in recipes.NAMES:
        raise ConfigError(f"{where} names the recipe {recipe!r}: {nearest(recipe, recipes.NAMES)}.")
    seeds = options.seeds or (1 if options.quick else entry.get("seeds", 3))
    settings = tuple(f"{path}={json.dumps(value)}" for path, value in entry.get("set", {}).items())
    run = Planned(
        label=str(entry.get("name", recipe)),
        recipe=recipe,
        preset=entry.get("preset", options.preset),
        settings=(*settings, *options.settings),
        epochs=options.epochs or entry.get("epochs"),
        finish_on_one=entry.get("finish_on_one"),
        procs=1 if recipe in recipes.ASYNCHRONOUS else entry.get("procs", options.procs),
    )
    run.config()  # a mistake is told before anything is started
    return [dataclasses.replace(run, seed=seed) for seed in range(seeds)]
