"""Huge batches on the embedded images, every system on two CPU cores: what a GPU is then asked to confirm.

    PYTHONPATH=src python benchmarks/huge/embedded.py search table auto rates text --seconds 540

The parts: `rates` (settings of `muon` at 1,024), `search` (a rate for each system at the huge batch, on held-out
images, grids that grow until the best is inside), `table` (three other seeds, the rates that `search` chose),
`auto` (plan: auto against a fixed plan), `text` (the same optimizer on gpt-mini). What is in the book is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from book import Book, config_of
from grid import widening

HOLDOUT = "data.holdout=0.75"  # 3,000 images to train on and 9,000 to judge: the test images are not looked at
SEEDS = (1, 2, 3)
"""Of the tables; the search has seed 0."""
BATCH, EPOCHS = 1024, 10
"""Three steps an epoch, 30 in all where the batch is constant: as 16,384 of 50,000 images."""
SYSTEMS: dict[str, tuple[float, tuple[str, ...]]] = {
    "leap": (0.1, ()),
    "muon": (0.1, ()),
    "sony": (8.0, ()),
    "fujitsu": (1.0, ("workers.count=32", "workers.local_batch=32")),
    "lars": (8.0, ("workers.count=32", "workers.local_batch=32")),
    "plain": (0.4, ()),
}
"""The middle of the rates, and settings that make batches alike."""


def rated(rate: float) -> tuple[str, ...]:
    """Settings of a rate that no rule changes."""
    return "lr.scaling=none", f"lr.base={rate:g}", "lr.follow_plan=false"


def rates(book: Book) -> None:
    """Rate, momentum and the rate of the rest for `muon` at its own batch."""
    for settings in MUON_TRIALS:
        name = " ".join(each.split(".", 1)[1] for each in settings)
        book.run(f"rates muon 1024 {name}", config_of("muon", 1024, (HOLDOUT, *settings)), device="cpu")


MUON_TRIALS: Sequence[tuple[str, ...]] = (
    ("lr.base=0.1", "optimizer.rest_lr=2.0"),
    ("lr.base=0.05", "optimizer.rest_lr=4.0"),
    ("lr.base=0.2", "optimizer.rest_lr=1.0"),
    ("lr.base=0.1", "optimizer.rest_lr=8.0"),
    ("lr.base=0.1", "optimizer.momentum=0.9"),
    ("lr.base=0.1", "optimizer.renormalise=false", "optimizer.weight_decay=0.05"),
)


def best_rate(book: Book, recipe: str, batch: int, *, run: bool) -> float:
    """The rate that the held-out images prefer; `run` trains what is missing for it."""
    middle, settings = SYSTEMS[recipe]
    trials = widening(middle)
    rate = next(trials)
    try:
        while True:
            name = f"search {recipe} {batch} rate {rate:g}"
            if run:
                config = config_of(recipe, batch, (*settings, *rated(rate), HOLDOUT), EPOCHS)
                score = book.run(name, config, device="cpu")["accuracy"]
            else:
                found = book.of(name)
                score = found[0]["accuracy"] if found else None
            rate = trials.send(score)
    except StopIteration as end:
        return float(end.value)


def search(book: Book) -> None:
    """A rate for each system."""
    for recipe in SYSTEMS:
        best_rate(book, recipe, BATCH, run=True)


def table(book: Book) -> None:
    """Seeds that no rate was chosen with."""
    for seed in SEEDS:
        for recipe, (_, settings) in SYSTEMS.items():
            rate = best_rate(book, recipe, BATCH, run=False)
            config = config_of(recipe, BATCH, (*settings, *rated(rate), HOLDOUT), EPOCHS)
            book.run(f"table {recipe} {BATCH} rate {rate:g}", config, seed, device="cpu")


FIRST = ("workers.count=4", "workers.local_batch=16")
FIXED = "plan=[{epoch: 4, count: 8, local_batch: 16}, {epoch: 7, count: 16, local_batch: 16}]"
AUTO: dict[str, tuple[str, ...]] = {
    "constant 64": ("plan=[]", *FIRST),
    "64, 128, 256 by plan": (*FIRST, FIXED),
    "64 and on, auto": (*FIRST, "plan=auto", "growth.measured=2"),
    "constant 256": ("plan=[]", "workers.count=16", "workers.local_batch=16"),
}
"""LARS with sony's settings: constant, by a fixed plan like Sony's, by the noise scale."""


def auto(book: Book) -> None:
    """The batch that follows the noise scale, against batches that are decided beforehand."""
    for seed in SEEDS:
        for name, settings in AUTO.items():
            config = config_of("sony", 2048, (*settings, HOLDOUT), EPOCHS)
            book.run(f"auto {name}", config, seed, device="cpu")


TEXT_BATCH, TEXT_EPOCHS = 256, 0.5
"""Sequences of 64 bytes; 28 steps where the batch is constant."""
TEXTS: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "leap": ("shakespeare", 0.02, ()),
    "adamw": ("mini", 0.008, ()),
    "lamb": ("mini", 0.02, ()),
    "leap constant": ("shakespeare", 0.04, ("plan=[]", f"workers.count={TEXT_BATCH // 4}")),
}
"""Preset, the middle of the rates, and settings: the batch of leap grows, the last one has the steps of the others."""


def text(book: Book) -> None:
    """One row of a sequence model: the last tenth of the training text judges, rates grow until the best is inside."""
    for name, (preset, middle, changes) in TEXTS.items():
        recipe = name.split()[0]
        trials = widening(middle, most=7)
        rate = next(trials)
        try:
            while True:
                settings = (*changes, *rated(rate), "data.holdout=0.1")
                config = config_of(recipe, TEXT_BATCH, settings, TEXT_EPOCHS, preset)
                row = book.run(f"text {name} {TEXT_BATCH} rate {rate:g}", config, device="cpu")
                rate = trials.send(None if "failure" in row else -row["bits_per_byte"])
        except StopIteration:
            continue


Part = Callable[[Book], None]
PARTS: dict[str, Part] = {"search": search, "table": table, "auto": auto, "rates": rates, "text": text}


def main() -> None:
    """Run parts one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--book", type=Path, default=Path(__file__).parent / "results" / "embedded.jsonl")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this long")
    options = parser.parse_args()
    book = Book(options.book, options.seconds)
    for part in options.parts:
        PARTS[part](book)


if __name__ == "__main__":
    main()
