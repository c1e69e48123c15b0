"""Operations on configurations, each in one place: other epochs, another batch, exact sums, the same experiment?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from bigstep.config.schema import RunConfig, Stage, WorkersConfig, config_from_mapping, config_to_mapping
from bigstep.errors import ConfigError, require
from bigstep.tables.codecs import CODECS

__all__ = [
    "decides_path", "find_change", "finish_on_one", "flatten", "follow_workers", "make_exact", "same_experiment",
    "scale_batch", "scale_workers", "stretch",
]  # fmt: skip

T = TypeVar("T", WorkersConfig, Stage)

FREE = ("data.path", "data.loaders", "data.decoder", "exchange.grid", "checkpoint", "kernels")
"""Settings that decide where and how fast a run computes, but not its path; a resumed run may change them, and must
change those that fit another number of ranks than it has."""


def stretch(config: RunConfig, epochs: float) -> RunConfig:
    """Return `config` for another number of epochs, with the stages of the run in proportion.

    Schedule, batch plan, image sizes, the optimizer's transition, the exchange's dense steps, the islands' beginning
    and Downpour's warm start keep their places in the run: a shorter one still warms up, and its schedule still ends.
    With plan=auto it has as many decisions on the batch. Meetings of islands, which count in steps, evaluations and
    checkpoints, which do not decide the path, stay as far apart as they are.

    >>> base = {"workers": {"count": 8, "local_batch": 32}, "epochs": 8, "lr": {"base": 0.1}}
    >>> base["asynchronous"] = {"method": "downpour", "warm_start": 2}
    >>> stretch(config_from_mapping(base), 1).asynchronous.warm_start
    0.25
    """
    require(0 < epochs < float("inf"), f"--epochs is {epochs}, but it must be greater than 0.")
    ratio = epochs / config.epochs
    plan, growth = config.plan, config.growth
    if plan == "auto":
        every = growth.every * ratio
        growth = replace(growth, every=max(1.0, round(every)) if config.data.drop_last else every)
    else:
        plan = tuple(replace(stage, epoch=stage.epoch * ratio) for stage in plan)
    pieces = tuple(
        replace(piece, until=piece.until * ratio, at=tuple(at * ratio for at in piece.at))
        for piece in config.lr.schedule
    )
    return replace(
        config,
        epochs=epochs,
        lr=replace(config.lr, schedule=pieces),
        plan=plan,
        growth=growth,
        data=replace(config.data, sizes=tuple(replace(size, epoch=size.epoch * ratio) for size in config.data.sizes)),
        exchange=replace(config.exchange, warmup_steps=round(config.exchange.warmup_steps * ratio)),
        islands=replace(config.islands, begin=config.islands.begin * ratio),
        asynchronous=replace(config.asynchronous, warm_start=config.asynchronous.warm_start * ratio),
        optimizer=config.optimizer.stretch(ratio),
    )


def scale_workers(config: RunConfig, *, count: float = 1, local_batch: float = 1, least: int = 1) -> RunConfig:
    """Return `config` with workers and local batches of all stages multiplied; no stage has fewer workers than `least`.

    The number of islands stays; they share the workers of every stage evenly.

    >>> base = {"workers": {"count": 8, "local_batch": 32}, "epochs": 8, "lr": {"base": 0.1}}
    >>> grown = config_from_mapping({**base, "plan": [{"epoch": 4, "count": 8, "local_batch": 64}]})
    >>> scaled = scale_workers(grown, count=2, local_batch=0.5)
    >>> scaled.workers, [(stage.count, stage.local_batch) for stage in scaled.plan]
    (WorkersConfig(count=16, local_batch=16), [(16, 32)])
    """
    islands = config.islands.count
    fewest = -(-least // islands) * islands

    def scale(stage: T) -> T:
        workers = round(stage.count * count / islands) * islands
        return replace(stage, count=max(fewest, workers), local_batch=max(1, round(stage.local_batch * local_batch)))

    plan = config.plan if config.plan == "auto" else tuple(map(scale, config.plan))
    return replace(config, workers=scale(config.workers), plan=plan)


def follow_workers(plan: Sequence[Stage], before: WorkersConfig, after: WorkersConfig) -> tuple[Stage, ...]:
    """Return the stages of a plan, scaled as the workers of the first stage were."""
    return tuple(
        replace(
            stage,
            count=max(1, round(stage.count * after.count / before.count)),
            local_batch=max(1, round(stage.local_batch * after.local_batch / before.local_batch)),
        )
        for stage in plan
    )


def scale_batch(config: RunConfig, batch: int, *, of_largest: bool = False) -> RunConfig:
    """Return `config` with another global batch, which its rate follows by the rule of its optimizer.

    The local batch stays, since it decides the batch-norm statistics; workers are added. A rate that does not follow
    the batch yet is made to: linearly for SGD (Goyal et al. 2017), by the square root where the length of a step does
    not depend on that of the gradient. At the run's own batch nothing changes.

    Args:
        config: A run.
        batch: The batch of its first stage, or with `of_largest` of its largest.
        of_largest: Whether `batch` is that of the largest stage rather than of the first.

    >>> base = {"workers": {"count": 8, "local_batch": 32}, "epochs": 8, "lr": {"base": 3, "scaling": "none"}}
    >>> lars = scale_batch(config_from_mapping({**base, "optimizer": {"name": "lars"}}), 1024)
    >>> lars.workers.count, lars.lr.scaling, lars.lr.base_batch
    (32, 'sqrt', 256)
    """
    stages = [stage.count * stage.local_batch for stage in config.stages] if of_largest else []
    scaled = scale_workers(config, count=batch / max([config.batch, *stages]))
    if config.lr.scaling != "none":
        return scaled
    return replace(scaled, lr=replace(config.lr, scaling=config.optimizer.batch_rule, base_batch=config.batch))


def finish_on_one(config: RunConfig, epochs: float) -> RunConfig:
    """Return `config` with its last `epochs` in small batches on one worker: parallel for speed, then precise.

    A last stage with one worker of `workers.local_batch` samples is added to the plan. Its rate follows the batch by
    the recipe's rule: with B the batch of the stage before and b the new one, the rate is b / B times what the schedule
    gives (Goyal's linear rule, read backwards; also if the rate does not scale with the batch), or sqrt(b / B) times
    under scaling=sqrt. With lr.follow_plan that happens anyway, and the stage leaves the rate alone.

    >>> base = {"workers": {"count": 8, "local_batch": 32}, "epochs": 4, "lr": {"base": 0.1}}
    >>> finish_on_one(config_from_mapping(base), 1).plan
    (Stage(epoch=3.0, count=1, local_batch=32, rate=0.125),)

    Reference: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1 (the linear rule).
    """
    require(
        0 < epochs < config.epochs,
        f"--finish-on-one is {epochs:g}, but it must be more than 0 and less than epochs ({config.epochs:g}).",
    )
    require(
        config.asynchronous.method == "none",
        f"--finish-on-one is for synchronous runs; a {config.asynchronous.method} run has no batch to shrink: "
        "leave it out.",
    )
    require(
        config.plan != "auto",
        "--finish-on-one adds a last stage to the plan, but plan is auto, whose batch never shrinks: leave one out.",
    )
    begin = config.epochs - epochs
    kept = tuple(stage for stage in config.stages if stage.epoch < begin)
    before = kept[-1].count * kept[-1].local_batch if kept else config.batch
    ratio = config.workers.local_batch / before
    rate = 1.0 if config.lr.follow_plan else ratio**0.5 if config.lr.scaling == "sqrt" else ratio
    earlier = kept[-1].rate if kept else 1.0
    last = Stage(epoch=begin, count=1, local_batch=config.workers.local_batch, rate=earlier * rate)
    return replace(config, plan=(*kept, last))


def make_exact(config: RunConfig) -> RunConfig:
    """Return `config` with sums that have the same bits on any number of ranks, or say why that is impossible.

    Half precision, between ranks or islands, is replaced; a codec that carries what it loses is refused by name.

    >>> base = {"workers": {"count": 8, "local_batch": 32}, "epochs": 8, "lr": {"base": 0.1}}
    >>> exact = make_exact(config_from_mapping(base))
    >>> exact.exact, exact.exchange.codec, exact.islands.codec
    (True, 'exact', 'exact')
    """
    for name, codec in {"exchange.codec": config.exchange.codec, "islands.codec": config.islands.codec}.items():
        require(
            CODECS[codec].loses != "carried",  # half precision only saves bytes; these codecs are another algorithm
            f"--exact sums without loss, but {name}={codec} carries what it loses, which is another algorithm: leave "
            f"one out, or use {name}=exact.",
        )
    return replace(
        config,
        exact=True,
        exchange=replace(config.exchange, codec="exact"),
        islands=replace(config.islands, codec="exact"),
    )


def same_experiment(one: RunConfig, other: RunConfig) -> bool:
    """Whether two configurations lead to the same run, wherever its files lie and however fast it computes.

    >>> base = {"workers": {"count": 8, "local_batch": 32}, "epochs": 8, "lr": {"base": 0.1}}
    >>> configs = [config_from_mapping({**base, **more}) for more in ({}, {"data": {"path": "elsewhere"}}, {"seed": 1})]
    >>> [same_experiment(configs[0], config) for config in configs]
    [True, True, False]
    """
    return find_change(config_to_mapping(one), other) is None


def find_change(before: Mapping[str, Any], config: RunConfig) -> str | None:
    """Name the first setting that differs from those a run was started with, as part of a sentence; None if none does.

    A setting that did not exist then has its default; one that no longer exists is a difference.
    """
    with contextlib.suppress(ConfigError):  # a setting that no longer exists is named below
        before = config_to_mapping(config_from_mapping(before))
    old, new = dict(flatten(before)), dict(flatten(config_to_mapping(config)))
    for path in filter(decides_path, [*old, *(path for path in new if path not in old)]):
        was, asked = old.get(path), new.get(path)
        if was != asked:
            return f"was started with {path}={was!r:.60}, but now {path}={asked!r:.60} is asked for"
    return None


def decides_path(path: str) -> bool:
    """Whether a setting, written with dots, decides what a run computes.

    >>> [decides_path(path) for path in ("lr.base", "checkpoint.every", "data.loaders")]
    [True, False, False]
    """
    return not any(path == free or path.startswith(f"{free}.") for free in FREE)


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested mapping with their dotted names.

    >>> dict(flatten({"a": {"b": 1, "c": [1, 2]}}))
    {'a.b': 1, 'a.c': [1, 2]}
    """
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
