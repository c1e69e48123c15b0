"""The search finished: grids that grow until the best is inside, the table that follows from them, and the ablation.

Parts, behind those of `ours.py`, which tunes and shows `leap` and `muon`:

`widen`      each system's rates at 14,720 and 2,048 on held-out images; three around its middle, then one more beyond
             whichever end is the best, until the best lies inside or seven were tried. 14,720 stands for 16,384: it
             takes the 45,000 images that are left in as many steps, as the search for `leap` and `muon` does
`first`      the first seed of `rounds` at 8,192 and more, of the systems whose search is over
`look`       `fair`, `pfn` and `onebit`: the second look at other settings that the others had, then their rates
`rounds`     test images, a whole seed before the next: `converged` at 8,192 and more, `auto`, `ablation` at 16,384 and
             8,192, `converged` at 2,048 and 512, `ablation` at 512

`converged`  all systems x batches, with one rule for all: the rate of 2,048 by the square root below it, and beyond it
             by the power of the batch that brings it to the rate of 16,384. A cell whose rate that leaves as it was
             is that of the first table, and not run again
`auto`       plan: auto against the fixed plans of `leap` and `sony`
`ablation`   what each technique buys, of `leap` and of `sony`
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ours
from first import second_look
from lanes import Lanes, singles
from runs import LOCAL, VALIDATION, Planned, config_of

from bigstep.engine.rates import learning_rate

sys.path.append(str(Path(__file__).parent.parent / "huge"))
from grid import widening  # noqa: E402
from techniques import without  # noqa: E402

SEEDS = 3
SEARCHED = {16384: ours.THREE_STEPS, 2048: 2048}
"""Batches of the table whose rates are searched for, each with the batch that stands for it on the images left."""
BATCHES = (16384, 8192, 25000, 2048, 512)
"""The ones that say most for their seconds first: 512 takes `leap` five times as long as 16,384 on a shared GPU."""
MIDDLES = {
    "sony": (6.0, 3.0), "plain": (0.8, 1.6), "fujitsu": (6.0, 6.0), "google": (1.6, 0.8), "fastai": (0.8, 0.8),
    "lars": (6.0, 6.0), "pfn": (1.6, 1.6), "fair": (0.4, 0.8), "onebit": (0.03, 0.03),
}  # fmt: skip
"""The middle of each system's rates at both batches, which the first search found, most wanted first; `tencent` is
`lars` on one rank."""
CHANGED = ("sony", "google")
"""Their batches grew otherwise in the first search, by workers and at other epochs: its runs do not count for them."""
FOLLOWED = ("plain",)
"""Their presets have taken the rule that this search found; in the first table their rates stayed beyond 2,048."""
LOOKED_AGAIN = ("fair", "pfn", "onebit")
"""They had no second look at settings other than the rate."""
OURS_AND_BEST = ("leap", "sony")

Rows = Mapping[str, Mapping[str, Any]]


class Best(NamedTuple):
    """What the search of a system found."""

    kept: tuple[str, ...]
    """Settings of the second look that helped."""
    large: float
    """Rate at 16,384."""
    small: float
    """Rate at 2,048."""


Search = Generator[Planned, Mapping[str, Any], Best]


def search_of(recipe: str) -> Search:
    """The whole search of a system, run after run."""
    kept = (yield from second_look(recipe)) if recipe in LOOKED_AGAIN else ()
    large = yield from widen_one(recipe, 16384, kept)
    small = yield from widen_one(recipe, 2048, kept)
    return Best(kept, large, small)


def widen(rows: Rows, systems: Sequence[str] = tuple(MIDDLES)) -> Lanes:
    """Rates at both batches for the systems that had their second look."""
    for batch in SEARCHED:
        for recipe in systems:
            if recipe not in LOOKED_AGAIN:
                yield widen_one(recipe, batch)  # type: ignore[misc]  # what a search returns is read from the book


def look(rows: Rows) -> Lanes:
    """The whole search of the systems that had no second look."""
    return (search_of(recipe) for recipe in LOOKED_AGAIN)  # type: ignore[misc]  # as above


def widen_one(recipe: str, batch: int, kept: tuple[str, ...] = ()) -> Generator[Planned, Mapping[str, Any], float]:
    """Rates of a system for a batch; returns the best."""
    trials = widening(MIDDLES[recipe][tuple(SEARCHED).index(batch)])
    rate = next(trials)
    while True:
        settings = ("lr.scaling=none", "lr.beyond=0", f"lr.base={rate:g}", *kept)
        name = f"{_called(recipe, batch, kept)}{rate:g}"
        row = yield Planned(name, recipe, SEARCHED[batch], settings, holdout=VALIDATION)
        try:
            rate = trials.send(row["accuracy"])
        except StopIteration as end:
            return float(end.value)


def _called(recipe: str, batch: int, kept: tuple[str, ...]) -> str:
    """How the names of a search begin; those of the first one are taken up where nothing has changed since."""
    again = " changed" if kept else " again" if recipe in CHANGED and batch == SEARCHED[batch] else ""
    return f"search{again} {recipe} {SEARCHED[batch]} rate "


def kept_of(rows: Rows, recipe: str) -> tuple[str, ...]:
    """What the second look at a system kept, as far as it went."""
    return (ours.result_of(second_look(recipe), rows) or ()) if recipe in LOOKED_AGAIN else ()


def found(rows: Rows, recipe: str, batch: int) -> dict[float, float]:
    """Held-out accuracy by rate, as far as it was searched."""
    prefix = _called(recipe, batch, kept_of(rows, recipe))
    named = {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}
    return {float(name.split()[0]): row["accuracy"] or 0.0 for name, row in named.items()}


def is_inside(rates: Mapping[float, float]) -> bool:
    """Whether the best of some rates has a neighbour on either side."""
    return bool(rates) and min(rates) < max(rates, key=rates.__getitem__) < max(rates)


def base_rate(recipe: str, batch: int, settings: tuple[str, ...] = ()) -> float:
    """The rate of a system at a batch, that of its largest stage, before its schedule."""
    config = config_of(recipe, batch, settings)
    return learning_rate(dataclasses.replace(config.lr, schedule=()), config.batch)(0.0, config.batch)


def rule_of(rows: Rows, recipe: str) -> tuple[str, ...] | None:
    """The settings of a system at any batch; None as long as its search is not over.

    A rule of the batch: the rates that were found at 2,048 and 16,384, as a square root up to the first and a power
    beyond it. The batch of a rule is that of the first stage.
    """
    best = ours.result_of(search_of(recipe), rows)
    if best is None:
        return None
    power = math.log(best.large / best.small) / math.log(max(SEARCHED) / min(SEARCHED))
    first = config_of(recipe, 2048).batch
    rule = (f"lr.base_batch={first}", f"lr.saturation={first}", f"lr.base={best.small:g}", f"lr.beyond={power:.3f}")
    return (*best.kept, "lr.scaling=sqrt", *rule)


def _settings(rows: Rows, recipe: str, batch: int) -> tuple[str, ...] | None:
    """Settings of a system at a batch: what was tuned of ours, the rule of two searches of the others."""
    if recipe in ours.TRIALS:
        return ours.at_batch(ours.settings_of(rows, recipe), batch)
    return rule_of(rows, recipe)


def name_of(rows: Rows, recipe: str, batch: int) -> str:
    """What the runs of a cell are called: those of the first table where they had the same settings."""
    return f"{'table' if stays(rows, recipe, batch) else 'converged'} {recipe} {batch}"


def stays(rows: Rows, recipe: str, batch: int) -> bool:
    """Whether the search has left a system as the first table has it at a batch: what it kept, and the rate."""
    best = None if recipe in ours.TRIALS else ours.result_of(search_of(recipe), rows)
    if best is None or best.kept or (recipe in FOLLOWED and batch > min(SEARCHED)):
        return False
    rates = (base_rate(recipe, batch, settings) for settings in ((), rule_of(rows, recipe) or ()))
    return math.isclose(*rates, rel_tol=0.02)


def converged(
    rows: Rows, seeds: Sequence[int] = range(SEEDS), batches: Sequence[int] = BATCHES,
    systems: Sequence[str] = (*ours.TRIALS, *MIDDLES),
) -> Lanes:  # fmt: skip
    """The table on test images; a system whose search is not over is left out."""
    rules = {(recipe, batch): _settings(rows, recipe, batch) for recipe in systems for batch in batches}
    return singles(
        Planned(name_of(rows, recipe, batch), recipe, batch, settings, seed=seed)
        for seed in seeds
        for batch in batches
        for recipe in systems
        if (settings := rules[recipe, batch]) is not None
    )


def left_out(recipe: str, batch: int, rows: Rows) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Settings that leave one technique out of a system, each by itself."""
    constant = (f"workers.count={batch // LOCAL}", f"workers.local_batch={LOCAL}")
    return without(recipe, "cifar10", constant, lambda other: _rate_alone(rows, other, batch))


def _rate_alone(rows: Rows, recipe: str, batch: int) -> tuple[str, ...]:
    """The rate of a system at a batch as a number, for another that takes its optimizer."""
    settings = _settings(rows, recipe, batch)
    if settings is None:
        return ()
    return "lr.scaling=none", "lr.beyond=0", f"lr.base={base_rate(recipe, batch, settings):.4g}"


def _whole(rows: Rows, recipe: str, batch: int) -> tuple[str, ...]:
    """A system before something is left out; its rate is a number, which another plan of batches does not change."""
    if recipe in ours.TRIALS:
        return ours.at_batch(ours.settings_of(rows, recipe), batch)
    return (*kept_of(rows, recipe), *_rate_alone(rows, recipe, batch))


def _changed(tuned: tuple[str, ...], settings: tuple[str, ...]) -> tuple[str, ...]:
    """Tuned settings with some changed; those of an optimizer that is exchanged go with it."""
    if any(each.startswith("optimizer.name=") for each in settings):
        tuned = tuple(each for each in tuned if not each.startswith("optimizer."))
    return (*tuned, *settings)


def ablation(rows: Rows, seeds: Sequence[int] = range(SEEDS), batches: Sequence[int] = (16384, 8192, 512)) -> Lanes:
    """What each technique buys; whole systems are in the table."""
    return singles(
        Planned(
            f"ablation {recipe} {batch} without {name}", recipe, batch,
            _changed(_whole(rows, recipe, batch), settings), seed=seed,
        )
        for seed in seeds
        for batch in batches
        for recipe in OURS_AND_BEST
        if _settings(rows, recipe, batch) is not None
        for name, settings in left_out(recipe, batch, rows)
    )  # fmt: skip


def auto(rows: Rows, seeds: Sequence[int] = range(SEEDS)) -> Lanes:
    """From a sixteenth of the batch on, doubled as the noise scale allows; the fixed plans are in the table."""
    growing = ("plan=auto", "growth.most=16", "growth.every=1", "growth.measured=5")

    def chosen(recipe: str, batch: int) -> tuple[str, ...]:
        first = (f"workers.count={batch // LOCAL // 16}", f"workers.local_batch={LOCAL}", *growing)
        if recipe not in ours.TRIALS:
            return (*first, *_rate_alone(rows, recipe, batch // 4))
        return (*first, *(each for each in ours.settings_of(rows, recipe) if not each.startswith(ours.GROWS)))

    return singles(
        Planned(f"auto {recipe} {batch}", recipe, batch, chosen(recipe, batch), seed=seed)
        for seed in seeds
        for recipe in OURS_AND_BEST
        if recipe in ours.TRIALS or rule_of(rows, recipe) is not None
        for batch in (16384, 8192)
    )


def rounds(rows: Rows) -> Lanes:
    """All that is shown on test images, so that a series cut short holds whole tables of fewer seeds."""
    for seed in range(SEEDS):
        yield from converged(rows, (seed,), (16384, 8192, 25000))
        yield from auto(rows, (seed,))
        yield from ablation(rows, (seed,), (16384, 8192))
        yield from converged(rows, (seed,), (2048, 512))
        yield from ablation(rows, (seed,), (512,))


def first(rows: Rows) -> Lanes:
    """What says most, soon: one seed where steps are few."""
    yield from converged(rows, (0,), (16384,))
    yield from auto(rows, (0,))
    yield from ablation(rows, (0,), (16384,))
    yield from converged(rows, (0,), (8192, 25000))
    yield from ablation(rows, (0,), (8192,))


ORDER = {"widen": widen, "first": first, "look": look, "rounds": rounds}
ALSO = {"converged": converged, "auto": auto, "ablation": ablation}
