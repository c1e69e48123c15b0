"""The suites: which runs stand side by side, and why. Building one starts nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bigstep import recipes
from bigstep.bench.ablation import techniques_of
from bigstep.bench.planned import Network, Planned
from bigstep.config import RunConfig
from bigstep.config.edit import scale_batch
from bigstep.described import usable_cores
from bigstep.errors import ConfigError, nearest

__all__ = ["SUITES", "Options", "Suite", "planned_runs"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for; None leaves it to the suite."""

    quick: bool = False
    seeds: int | None = None
    epochs: float | None = None
    recipes: tuple[str, ...] = ()
    preset: str = "mini"
    settings: tuple[str, ...] = ()
    """For every run, as `--set` takes them."""
    trust: bool = False
    """Whether code that a file names may run."""
    procs: int = 2
    """Ranks of a synchronous run; the scaling suite goes up to it."""
    tuned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By recipe, the settings that tuning chose."""


@dataclass(frozen=True)
class Scale:
    """How large the runs of a preset are."""

    epochs: float = 1.0
    """Factor on the epochs of a suite."""
    batches: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    quick_batches: tuple[int, ...] = (256, 1024, 4096)
    of_largest: bool = False
    """Whether these are the batches of a plan's largest stage, which must fit the data, instead of its first."""


MINI = Scale()
SCALES = {"cifar10": Scale(2.5, (512, 2048, 8192, 16384, 24992), (512, 4096, 16384), of_largest=True)}
"""By preset, where it is not that of the embedded data: as many epochs as the preset has, and its own batches."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A question, and the runs that answer it."""

    name: str
    question: str
    epochs: float
    quick_epochs: float
    recipes: tuple[str, ...]
    """Those that take part unless others are named."""
    build: Callable[[Suite, Options], list[Planned]]
    """Makes the runs of one seed."""


def planned_runs(suite: Suite, options: Options) -> list[Planned]:
    """Return the runs of a suite: seed by seed, so that an interrupted suite has whole comparisons."""
    for name in options.recipes:
        if name not in recipes.NAMES:
            raise ConfigError(f"--recipes names {name!r}, which is unknown: {nearest(name, recipes.NAMES)}")
    refuse_seed(options.settings)
    seeds = options.seeds or (1 if options.quick else 3)
    once = list(dict.fromkeys(suite.build(suite, options)))  # on one core, "one replica" is "one per core"
    if not once:
        raise ConfigError(f"--recipes names none that {suite.name} compares; choose from {', '.join(suite.recipes)}.")
    return [dataclasses.replace(run, seed=seed) for seed in range(seeds) for run in once]


def refuse_seed(settings: Iterable[str]) -> None:
    """Refuse a seed, which would be overridden: a suite runs the seeds 0, 1, 2, …"""
    if any(setting.partition("=")[0].strip() == "seed" for setting in settings):
        raise ConfigError("seed is set, but a suite runs the seeds 0, 1, 2, … by itself; set their number instead.")


def _run(suite: Suite, options: Options, recipe: str, label: str = "", *more: str, **fields: object) -> Planned:
    """One run under the suite's terms: the same samples for all, and the settings that were asked for."""
    usual = suite.quick_epochs if options.quick else suite.epochs
    epochs = options.epochs or usual * _scale(options).epochs
    asynchronous = recipe in recipes.ASYNCHRONOUS
    run = Planned(
        label=label or recipe,
        recipe=recipe,
        preset=options.preset,
        settings=(*options.tuned.get(recipe, ()), *more, *options.settings),
        epochs=epochs,
        procs=1 if asynchronous else options.procs,
    )
    return dataclasses.replace(run, **fields)  # type: ignore[arg-type]  # fields of Planned


def _base(suite: Suite, options: Options, recipe: str) -> RunConfig:
    return _run(suite, options, recipe).config()


def _scale(options: Options) -> Scale:
    return SCALES.get(options.preset, MINI)


def _chosen(suite: Suite, options: Options) -> Iterable[str]:
    """The recipes that were named, else those of the suite that have the preset."""
    if options.recipes:
        return options.recipes
    found = [name for name in suite.recipes if options.preset in recipes.describe(name).presets]
    if not found:
        known = sorted({preset for name in suite.recipes for preset in recipes.describe(name).presets})
        raise ConfigError(
            f"--preset is {options.preset!r}, which no recipe of {suite.name} has; choose from {', '.join(known)}."
        )
    return found


def _seeds(suite: Suite, options: Options) -> list[Planned]:
    runs = [_run(suite, options, recipe) for recipe in _chosen(suite, options)]
    if not options.recipes:
        epochs = runs[0].epochs or 0
        last = min(max(1, round(epochs / 8)), epochs / 2)
        runs.append(_run(suite, options, "plain", "plain then one worker", finish_on_one=last))
    return runs


def _batch(suite: Suite, options: Options) -> list[Planned]:
    batches = _scale(options).quick_batches if options.quick else _scale(options).batches
    runs = []
    for recipe in _chosen(suite, options):
        base = _base(suite, options, recipe)
        runs += [
            _run(suite, options, recipe, "", *batch_settings(base, batch, _scale(options)), variant=f"batch {batch}")
            for batch in batches
        ]
    return runs


def batch_settings(base: RunConfig, batch: int, scale: Scale = MINI) -> list[str]:
    """Return the settings that give a recipe another batch, as `scale_batch` does."""
    scaled = scale_batch(base, batch, of_largest=scale.of_largest)
    settings = [f"workers.count={scaled.workers.count}"]  # the stages of a plan follow
    if scaled.lr != base.lr:
        settings += [f"lr.scaling={scaled.lr.scaling}", f"lr.base_batch={scaled.lr.base_batch}"]
    return settings


def _exchange(suite: Suite, options: Options) -> list[Planned]:
    flat = Network(hosts=4, rate="100mbit")
    two_levels = Network(hosts=4, rate="1gbit", nodes=2, rate_between="100mbit")
    ways = {
        "ring fp32": ("ring", "none"), "ring fp16": ("ring", "fp16"), "halving fp32": ("halving", "none"),
        "torus fp16": ("torus", "fp16"), "hierarchical fp16": ("hierarchical", "fp16"),
        "powersgd": ("ring", "powersgd"), "1-bit": ("gather", "onebit"),
    }  # fmt: skip
    networks = (
        {"100 Mbit/s": flat}
        if options.quick
        else {"100 Mbit/s": flat, "1 Gbit/s inside and 100 Mbit/s between": two_levels}
    )
    runs = []
    for place, network in networks.items():
        for name, (collective, codec) in ways.items():
            exchange = f"exchange={json.dumps({'collective': collective, 'codec': codec})}"
            # many weights, little arithmetic: the network decides; without batch norm it needs a tenth of the rate
            settings = ("model=mlp", "lr.base=0.02", exchange)
            runs += [
                _run(suite, options, recipe, f"{recipe} by {name} at {place}", *settings, network=network)
                for recipe in _chosen(suite, options)
            ]
    return runs


def _scaling(suite: Suite, options: Options) -> list[Planned]:
    counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= options.procs]
    if options.procs not in counts:
        counts.append(options.procs)
    runs = []
    for recipe in _chosen(suite, options):
        for ranks in counts:
            strong, weak = 8 * counts[-1], 8 * ranks
            for label, workers in ((f"{recipe} strong", strong), (f"{recipe} weak", weak)):
                workers_set, variant = f"workers.count={workers}", f"ranks {ranks}"
                runs.append(_run(suite, options, recipe, label, workers_set, procs=ranks, variant=variant))
    return runs


def _asynchronous(suite: Suite, options: Options) -> list[Planned]:
    cores = usable_cores()
    runs = []
    for recipe in _chosen(suite, options):
        if recipe not in recipes.ASYNCHRONOUS:
            runs.append(_run(suite, options, recipe, f"{recipe} on one worker", "workers.count=1", procs=1))
            continue
        for replicas in (1, cores) if options.quick else (1, cores, 2 * cores):
            variant = f"replicas {replicas}"
            runs.append(_run(suite, options, recipe, "", f"asynchronous.replicas={replicas}", variant=variant))
    return runs


def _ablation(suite: Suite, options: Options) -> list[Planned]:
    runs = []
    for recipe in _chosen(suite, options):
        runs.append(_run(suite, options, recipe))
        base = _base(suite, options, recipe)
        for technique in techniques_of(base):
            label = f"{recipe} without {technique.name}"
            runs.append(_run(suite, options, recipe, label, *technique.off(base), without=technique.name))
    return runs


TEXT_BATCHES = {"mini": (16, 64, 256, 1024), "books": (64, 256, 1024, 4096)}
"""Sequences per step, by preset; under every rule the rate grows with their square root."""

SGD_ON_TEXT = (
    "optimizer.name=sgd",
    "optimizer.momentum=0.9",
    "optimizer.nesterov=true",
    "optimizer.weight_decay=0.0001",
)
LARS_ON_TEXT = ("optimizer.name=lars", "optimizer.momentum=0.9", "optimizer.weight_decay=0.0001")
RULES: dict[str, tuple[str, tuple[str, ...], float]] = {
    "sgd": ("adamw", SGD_ON_TEXT, 125.0),
    "lars": ("adamw", LARS_ON_TEXT, 1000.0),
    "adamw": ("adamw", (), 1.0),
    "lamb": ("lamb", (), 1.0),
    "adamw, 1-bit": ("adamw", ('exchange={"collective": "gather", "codec": "onebit"}',), 1.0),
}
"""By label: a text recipe, what is changed in it, and the rate as a multiple of the recipe's own.

Rates tried with gpt-mini, 16 sequences and one seed: SGD 0.5 and 1, LARS 2, 8 and 16; above the best, LARS fails to
learn.
"""


def _sequence(suite: Suite, options: Options) -> list[Planned]:
    """Every rule at every batch, over the same tokens; model, data, clipping and schedule are those of the recipe."""
    if options.preset not in TEXT_BATCHES:
        raise ConfigError(f"--preset is {options.preset!r}, but this suite has {' and '.join(TEXT_BATCHES)}.")
    batches = TEXT_BATCHES[options.preset][:: 2 if options.quick else 1]
    runs = []
    for label, (recipe, changes, factor) in RULES.items():
        if options.recipes and recipe not in options.recipes:
            continue
        base = _base(suite, options, recipe)
        rate = (f"lr.base={base.lr.base * factor:.6g}",) if factor != 1 else ()
        for batch in batches:
            settings = (*changes, *rate, *batch_settings(base, batch))
            runs.append(_run(suite, options, recipe, label, *settings, variant=f"batch {batch}"))
    return runs


TWINS = {"localsgd": "plain", "postlocal": "plain", "diloco": "adamw", "streaming": "adamw"}
"""By islands recipe, the synchronous recipe that it is compared with."""


def _islands(suite: Suite, options: Options) -> list[Planned]:
    """Every number of islands with every H, over the same samples, beside the synchronous run that they replace."""
    counts, steps_between = ((4,), (5, 20)) if options.quick else ((2, 4), (1, 5, 20, 50))
    chosen = [recipe for recipe in _chosen(suite, options) if recipe in TWINS]
    runs = [
        _run(suite, options, twin, f"{twin}, synchronous") for twin in dict.fromkeys(map(TWINS.get, chosen)) if twin
    ]
    for recipe in chosen:
        overlap = recipes.load(recipe, options.preset).islands.overlap
        for count in counts:
            label = f"{recipe}, {count} islands"
            for every in steps_between:
                if every > overlap:
                    settings = (f"islands.count={count}", f"islands.every={every}")
                    runs.append(_run(suite, options, recipe, label, *settings, variant=f"H {every}"))
    return runs


OF_IMAGES = recipes.SYNCHRONOUS + recipes.ASYNCHRONOUS

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            name="seeds",
            question="Which system is best here, on equal terms?",
            epochs=12,
            quick_epochs=6,
            recipes=OF_IMAGES,
            build=_seeds,
        ),
        Suite(
            name="batch",
            question="How far can each system grow its batch before accuracy falls?",
            epochs=8,
            quick_epochs=5,
            recipes=recipes.SYNCHRONOUS,
            build=_batch,
        ),
        Suite(
            name="exchange",
            question="Which collective and which codec pay on a slow network?",
            epochs=8,
            quick_epochs=3,
            recipes=("plain",),
            build=_exchange,
        ),
        Suite(
            name="scaling",
            question="What do more ranks bring, and where does the rest of the time go?",
            epochs=4,
            quick_epochs=2,
            recipes=("plain",),
            build=_scaling,
        ),
        Suite(
            name="async",
            question="What do replicas that wait for nobody bring, and how stale do they get?",
            epochs=4,
            quick_epochs=2,
            recipes=("plain", *recipes.ASYNCHRONOUS),
            build=_asynchronous,
        ),
        Suite(
            name="ablation",
            question="What does each technique of each system bring, and what does it cost?",
            epochs=10,
            quick_epochs=5,
            recipes=OF_IMAGES,
            build=_ablation,
        ),
        Suite(
            name="sequence",
            question="Does what holds for ResNets at large batches hold for text?",
            epochs=1,
            quick_epochs=0.5,
            recipes=recipes.SEQUENCE,
            build=_sequence,
        ),
        Suite(
            name="islands",
            question="How rarely may islands meet, how many may there be, and what do they save in bytes?",
            epochs=0.5,
            quick_epochs=0.1,
            recipes=("diloco", "streaming"),
            build=_islands,
        ),
    )
}
"""Every suite by name."""
