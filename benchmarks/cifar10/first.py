"""The parts that the presets of `cifar10` came from, before the search was finished (`converged.py`).

`search` and `tune` (settings, on held-out images), `table` (systems x batches), `spread` (more seeds of one cell),
`norms`, `curves`, `law` (epochs against batch), `reach` and `speed` (94 % at 2,048). `run.py` carries them out.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from runs import BATCHES, VALIDATION, Parts, Planned

from bigstep.recipes import SYNCHRONOUS

SEEDS = 3
SEARCHED = (2048, 16384)
"""Batches of the search; the rule of each system follows from both."""
PEAKS = {
    "plain": 1.6, "fair": 0.8, "google": 0.8, "fastai": 0.4, "pfn": 0.8, "onebit": 0.06,
    "lars": 3.0, "sony": 3.0, "fujitsu": 3.0, "tencent": 3.0,
}  # fmt: skip
"""The middle of each system's rates; the budget is three rates at each batch for all."""
FACTORS = (1.0, 0.5, 2.0)


def search() -> Parts:
    """Three rates for each system at each of two batches, judged on images held out of training."""
    for factor in FACTORS:
        for batch in SEARCHED:
            for recipe in SYNCHRONOUS:
                rate = PEAKS[recipe] * factor
                settings = ("lr.scaling=none", f"lr.base={rate:g}")
                yield Planned(f"search {recipe} {batch} rate {rate:g}", recipe, batch, settings, holdout=VALIDATION)


def _warmed(epochs: float, *rest: str) -> str:
    """A schedule that warms up for so many epochs."""
    return f"lr.schedule=[{{shape: warmup, until: {epochs}, start: 0.0, end: 1.0}}, {', '.join(rest)}]"


LINE = "{shape: linear, until: 30, start: 1.0, end: 0.0}"
SQUARE = "{shape: polynomial, until: 30, start: 1.0, end: 0.0, power: 2.0}"
STEPS = "{shape: step, until: 30, at: [10, 20, 27], factor: 0.1}"
TABLE = "{shape: table, until: 30, at: [24, 28], values: [1.0, 0.2, 0.04]}"
LATER = "lr.schedule=[{shape: warmup, until: 2, start: 0.0, end: 1.0}, {shape: step, until: 30, at: [15, 24, 28]}]"
LARGER, LIGHTER = "lr.saturation=8192", "optimizer.weight_decay=0.0001"
TUNED = 14720
"""Workers of 32 that take 45,000 images in as many steps as 16,384 takes 50,000: three an epoch."""
COUNT = TUNED // 32
GROWING = (
    f"workers.count={COUNT}", "workers.local_batch=8",
    f"plan=[{{epoch: 10, count: {COUNT}, local_batch: 16}}, {{epoch: 20, count: {COUNT}, local_batch: 32}}]",
)  # fmt: skip
"""How the preset of google is now; in the search and in the other trials the number of workers grew."""
TRIALS: dict[str, dict[str, tuple[str, ...]]] = {
    "sony": {"larger": (LARGER,), "warm-up 2": (_warmed(2, SQUARE),), "local batch grows": GROWING},
    "google": {"larger": (LARGER,), "warm-up 5": (_warmed(5, TABLE),), "local batch grows": GROWING},
    "lars": {"larger": (LARGER,), "warm-up 2": (_warmed(2, SQUARE),), "lighter": (LIGHTER,)},
    "fujitsu": {"larger": (LARGER,), "warm-up 2": (_warmed(2, LINE),), "lighter": (LIGHTER,)},
    "fastai": {
        "larger": ("lr.saturation=4096",),
        "grows once": (f"plan=[{{epoch: 21, count: {COUNT}, local_batch: 32}}]",),
        "lighter": (LIGHTER,),
    },
    "plain": {"warm-up 2": (_warmed(2, LINE),), "warm-up 10": (_warmed(10, LINE),), "lighter": (LIGHTER,)},
    "fair": {"warm-up 5": (_warmed(5, STEPS),), "later": (LATER,), "lighter": (LIGHTER,)},
    "pfn": {"later": ("optimizer.blend_center=6",), "earlier": ("optimizer.blend_center=1.7",), "lighter": (LIGHTER,)},
    "onebit": {"warm-up 5": (_warmed(5, LINE),), "momentum": ("optimizer.momentum=0.9",), "lighter": (LIGHTER,)},
}
"""Three changes for each system, tried one after the other; `tencent` follows the path of `lars` on one rank."""


def second_look(recipe: str) -> Generator[Planned, Mapping[str, Any], tuple[str, ...]]:
    """Changes of other settings than the rate, at three steps an epoch; one that helps stays for the next.

    Returns what stayed.
    """
    kept: tuple[str, ...] = ()
    best = yield Planned(f"tune {recipe} as searched", recipe, TUNED, holdout=VALIDATION)
    for name, settings in TRIALS[recipe].items():
        row = yield Planned(f"tune {recipe} {name}", recipe, TUNED, (*kept, *settings), holdout=VALIDATION)
        if (row["accuracy"] or 0) > (best["accuracy"] or 0):
            best, kept = row, (*kept, *settings)
    return kept


def tune() -> Parts:
    """A second look at every system; `fair`, `pfn` and `onebit` have theirs in `converged.py`."""
    for recipe in TRIALS:
        yield from second_look(recipe)


def table() -> Parts:
    """All systems x batches x seeds with the presets' own rules; `tencent` on one rank is `lars`, bit for bit."""
    for seed in range(SEEDS):
        for batch in BATCHES:
            for recipe in SYNCHRONOUS:
                if recipe != "tencent":
                    yield Planned(f"table {recipe} {batch}", recipe, batch, seed=seed)


def norms() -> Parts:
    """Statistics of the whole batch at 16,384; those of each worker's own are in the table."""
    for seed in range(SEEDS):
        whole = ("workers.count=1", "workers.local_batch=16384")
        yield Planned("norms whole 16384", "fujitsu", 16384, whole, seed=seed)


def curves() -> Parts:
    """Fused kernels and graphs against plain torch: the same curves."""
    for seed in range(SEEDS):
        for kernels in ("auto", "plain"):
            settings = (f"kernels={kernels}", "evaluate_every=1")
            yield Planned(f"curves {kernels}", "plain", 512, settings, epochs=8, seed=seed)


SMOOTH = "loss.label_smoothing=0.1"
LONGER = 50
"""Epochs of the runs that are to reach 94 %; as many as fit into 15 seconds, with some left."""
CONTESTANTS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "lars": ("lars", 2048, ()),
    "lars smoothed": ("lars", 2048, (SMOOTH,)),
    "plain": ("plain", 2048, ()),
    "fujitsu": ("fujitsu", 2048, ()),
    "sony": ("sony", 8192, ()),
}
"""Name: recipe, batch, settings; that of sony is its largest, the first stage has 2,048. Tried when it grew earlier."""


CHOSEN = "fujitsu"
"""Second of the contestants on held-out images, within the error of the first, and better on the table's first seed."""


def speed() -> Parts:
    """Twenty seeds of one of the contestants of `reach`: time to 94 % at a batch of at least 2,048."""
    recipe, batch, settings = CONTESTANTS[CHOSEN]
    for seed in range(20):
        yield Planned(f"speed {CHOSEN} {batch} epochs {LONGER}", recipe, batch, settings, LONGER, seed)


def spread() -> Parts:
    """Seventeen more seeds of `lars` at 2,048: how far seeds lie apart."""
    for seed in range(SEEDS, 20):
        yield Planned("table lars 2048", "lars", 2048, seed=seed)


LENGTHS = {512: (5, 9), 2048: (8, 13), 8192: (20,), 16384: (48,)}


def law() -> Parts:
    """`lars` with other numbers of epochs: how many each batch needs for an accuracy; 30 are in the table."""
    for batch, lengths in LENGTHS.items():
        for epochs in lengths:
            yield Planned(f"law lars {batch} epochs {epochs}", "lars", batch, epochs=epochs)


GROWTHS = ((10, 20, 2.0), (14, 24, 2.0), (16, 26, 2.0), (10, 20, 1.0), (14, 24, 1.0))
"""Epochs at which the batch of sony grows, and the power of its decay."""


def grown(first: int, second: int, power: float) -> tuple[str, ...]:
    """Settings of sony that let its batch grow at these epochs."""
    stages = (f"{{epoch: {at}, count: {COUNT}, local_batch: {size}}}" for at, size in ((first, 16), (second, 32)))
    decay = f"{{shape: polynomial, until: 30, start: 1.0, end: 0.0, power: {power}}}"
    return (*GROWING[:2], f"plan=[{', '.join(stages)}]", _warmed(5, decay))


def reach() -> Parts:
    """What may bring 94 % at 2,048 within 15 seconds, and the last 0.2 points at 16,384; on held-out images."""
    for name, (recipe, batch, settings) in CONTESTANTS.items():
        yield Planned(f"reach {name} {batch} epochs {LONGER}", recipe, batch, settings, LONGER, holdout=VALIDATION)
    for seed in range(2):
        for first, second, power in GROWTHS:
            name = f"reach sony grows at {first} and {second} power {power:g}"
            settings = grown(first, second, power)
            yield Planned(name, "sony", TUNED, settings, seed=seed, holdout=VALIDATION)


FIRST = {
    "search": search, "tune": tune, "table": table, "norms": norms, "curves": curves, "speed": speed, "law": law,
    "reach": reach, "spread": spread,
}  # fmt: skip
"""What the presets came from."""
