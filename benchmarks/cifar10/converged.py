"""The search finished: grids that grow until the best is inside, the table that follows from them, and the ablation.

Parts, behind those of `ours.py`, which tunes and shows `leap` and `muon`:

`widen`      each system's rates at 14,720 and 2,048 on held-out images; three around its middle, then one more beyond
             whichever end is the best, until the best lies inside or seven were tried. 14,720 stands for 16,384: it
             takes the 45,000 images that are left in as many steps, as the search for `leap` and `muon` does
`auto`       plan: auto against the fixed plans of `leap` and `sony`; few runs, so before the many
`converged`  test images: all systems x batches x seeds, a whole seed before the next, with one rule for all: the rate
             of 2,048 by the square root below it, between the two batches their geometric mean in proportion, and the
             rate of 16,384 beyond
`ablation`   what each technique buys at 16,384, 8,192 and 512, of `leap` and of `sony`
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ours
from lanes import Lanes, singles
from runs import LOCAL, VALIDATION, Planned

sys.path.append(str(Path(__file__).parent.parent / "huge"))
from grid import widening  # noqa: E402
from techniques import without  # noqa: E402

SEEDS = 3
SEARCHED = {16384: ours.THREE_STEPS, 2048: 2048}
"""Batches of the table whose rates are searched for, each with the batch that stands for it on the images left."""
BATCHES = (16384, 8192, 25000, 2048, 512)
"""The ones that say most for their seconds first: 512 takes `leap` five times as long as 16,384 on a shared GPU."""
MIDDLES = {
    "sony": 3.0, "plain": 1.6, "fujitsu": 3.0, "google": 0.8, "fastai": 0.4, "lars": 3.0, "pfn": 0.8, "fair": 0.8,
    "onebit": 0.06,
}  # fmt: skip
"""The middle of each system's rates, most wanted first; `tencent` is `lars` on one rank."""
CHANGED = ("sony", "google")
"""Their batches grew otherwise in the first search, by workers and at other epochs: its runs do not count for them."""

Rows = Mapping[str, Mapping[str, Any]]


def widen(rows: Rows, systems: Sequence[str] = tuple(MIDDLES)) -> Lanes:
    """Rates for every system at both batches; each is a lane."""
    return (widen_one(recipe, batch) for batch in SEARCHED for recipe in systems)


def widen_one(recipe: str, batch: int) -> Generator[Planned, Mapping[str, Any], float]:
    """Rates of a system for a batch; returns the best."""
    trials = widening(MIDDLES[recipe])
    rate = next(trials)
    while True:
        row = yield _searched(recipe, batch, rate)
        try:
            rate = trials.send(row["accuracy"])
        except StopIteration as end:
            return float(end.value)


def _searched(recipe: str, batch: int, rate: float) -> Planned:
    settings = ("lr.scaling=none", f"lr.base={rate:g}")
    return Planned(f"{_called(recipe, batch)}{rate:g}", recipe, SEARCHED[batch], settings, holdout=VALIDATION)


def _called(recipe: str, batch: int) -> str:
    """How the names of a search begin; those of the first one are taken up where nothing has changed since."""
    again = " again" if recipe in CHANGED and batch == SEARCHED[batch] else ""
    return f"search{again} {recipe} {SEARCHED[batch]} rate "


def found(rows: Rows, recipe: str, batch: int) -> dict[float, float]:
    """Held-out accuracy by rate, as far as it was searched."""
    prefix = _called(recipe, batch)
    named = {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}
    return {float(name.split()[0]): row["accuracy"] or 0.0 for name, row in named.items()}


def is_inside(rates: Mapping[float, float]) -> bool:
    """Whether the best of some rates has a neighbour on either side."""
    return bool(rates) and min(rates) < max(rates, key=rates.__getitem__) < max(rates)


def rate_of(rows: Rows, recipe: str, batch: int) -> float | None:
    """The rate of a batch by the rule of two searches; None as long as one of them is not over."""
    (most, large), (least, small) = ((size, ours.result_of(widen_one(recipe, size), rows)) for size in SEARCHED)
    if large is None or small is None:
        return None
    if batch <= least:
        return small * math.sqrt(batch / least)
    share = min(1.0, math.log(batch / least) / math.log(most / least))
    return float(small ** (1 - share) * large**share)


def _rated(rows: Rows, recipe: str, batch: int) -> tuple[str, ...]:
    """Settings of a system at a batch: what was tuned of ours, the rate by the rule of two searches of the others."""
    if recipe in ours.TRIALS:
        return ours.at_batch(ours.settings_of(rows, recipe), batch)
    rate = rate_of(rows, recipe, batch)
    return () if rate is None else ("lr.scaling=none", f"lr.base={rate:.4g}")


def converged(rows: Rows, systems: Sequence[str] = tuple(MIDDLES)) -> Lanes:
    """The table on test images; a system whose search is not over is left out."""
    return singles(
        Planned(f"converged {recipe} {batch}", recipe, batch, settings, seed=seed)
        for seed in range(SEEDS)
        for batch in BATCHES
        for recipe in systems
        if (settings := _rated(rows, recipe, batch))
    )


def left_out(recipe: str, batch: int, rows: Rows) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Settings that leave one technique out of a system, each by itself."""
    constant = (f"workers.count={batch // LOCAL}", f"workers.local_batch={LOCAL}")
    return without(recipe, "cifar10", constant, lambda other: _rated(rows, other, batch))


def _changed(tuned: tuple[str, ...], settings: tuple[str, ...]) -> tuple[str, ...]:
    """Tuned settings with some changed; those of an optimizer that is exchanged go with it."""
    if any(each.startswith("optimizer.name=") for each in settings):
        tuned = tuple(each for each in tuned if not each.startswith("optimizer."))
    return (*tuned, *settings)


def ablation(rows: Rows) -> Lanes:
    """What each technique buys; whole systems are in the table."""
    return singles(
        Planned(
            f"ablation {recipe} {batch} without {name}", recipe, batch,
            _changed(_rated(rows, recipe, batch), settings), seed=seed,
        )
        for seed in range(SEEDS)
        for recipe in ("leap", "sony")
        for batch in (16384, 8192, 512)
        for name, settings in left_out(recipe, batch, rows)
    )  # fmt: skip


def auto(rows: Rows) -> Lanes:
    """From a sixteenth of the batch on, doubled as the noise scale allows; the fixed plans are in the table."""
    growing = ("plan=auto", "growth.most=16", "growth.every=1", "growth.measured=5")

    def chosen(recipe: str, batch: int) -> tuple[str, ...]:
        tuned = tuple(each for each in _rated(rows, recipe, batch // 4) if not each.startswith("plan="))
        return (f"workers.count={batch // LOCAL // 16}", f"workers.local_batch={LOCAL}", *growing, *tuned)

    return singles(
        Planned(f"auto {recipe} {batch}", recipe, batch, chosen(recipe, batch), seed=seed)
        for seed in range(SEEDS)
        for recipe in ("leap", "sony")
        for batch in (16384, 8192)
    )


ORDER = {"widen": widen, "auto": auto, "converged": converged, "ablation": ablation}
