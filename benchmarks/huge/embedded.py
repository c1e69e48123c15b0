"""Huge batches on the embedded images, every system on two CPU cores: what a GPU is then asked to confirm.

    PYTHONPATH=src python benchmarks/huge/embedded.py search table ablation auto rates text second_order --seconds 540

The parts: `rates` (settings of `muon` at 1,024), `search` (a rate for each system at a huge and at a large batch, on
held-out images, grids that grow until the best is inside), `table` (three other seeds, the rates that `search` chose),
`ablation` (the same seeds without one technique), `auto` (plan: auto against a fixed plan), `text` (the same optimizer
on gpt-mini), `second_order` (Shampoo and SOAP in the place of Muon). What is in the book is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from book import Book, config_of
from grid import widening
from techniques import without

HOLDOUT = "data.holdout=0.75"  # 3,000 images to train on and 9,000 to judge: the test images are not looked at
SEEDS = (1, 2, 3)
"""Of the tables; the search has seed 0."""
MANY_SEEDS = range(1, 11)
BATCHES, EPOCHS = (1024, 128), 10
"""Three steps an epoch, 30 in all where the batch is constant, as 16,384 of 50,000 images; and 24, as 2,048."""
LOCAL = 32
SYSTEMS: dict[str, tuple[float, tuple[str, ...]]] = {
    "leap": (0.1, ()),
    "muon": (0.1, ()),
    "sony": (8.0, ()),
    "plain": (0.4, ()),
    "google": (0.4, ()),
    "fujitsu": (1.0, (f"workers.local_batch={LOCAL}",)),
    "lars": (8.0, ()),
    "fastai": (0.4, ()),
    "pfn": (0.4, ()),
    "fair": (0.4, ()),
    "onebit": (0.06, ()),
    "localsgd": (0.4, ()),
    "postlocal": (0.4, ()),
    "localsgd, last batch": (0.4, ("norm.statistics=last_batch",)),
    "postlocal, last batch": (0.4, ("norm.statistics=last_batch",)),
}
"""A recipe and what is said of it: the middle of its rates at 1,024, and settings. `tencent` is `lars` on one rank, and
there `onebit` quantises nothing; islands have as many workers in all as the others."""


GRAFTED = "{momentum: 0.8, renormalise: true, rest: sgd, rest_lr: 2.0}"
PUBLISHED = "{momentum: 0.8, rest: adamw, graft: false}"
SECOND_ORDER: dict[str, tuple[float, tuple[str, ...]]] = {
    f"{recipe}, {name}": (middle, (f"optimizer.name=second_order:{rule}", f"optimizer.settings={settings}"))
    for recipe in ("leap", "muon")
    for name, rule, middle, settings in (
        ("Shampoo", "Shampoo", 0.1, GRAFTED),
        ("SOAP", "Soap", 0.1, GRAFTED),
        ("SOAP as published", "Soap", 0.004, PUBLISHED),
    )
}
"""The same two systems with another direction of the same length; the last with steps of Adam's length, as it came."""


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


def chosen(system: str, batch: int) -> tuple[str, ...]:
    """Settings of a system at a batch, but for its rate."""
    _, settings = (SYSTEMS | SECOND_ORDER)[system]
    count = (f"workers.count={batch // LOCAL}",) if f"workers.local_batch={LOCAL}" in settings else ()
    return (*count, *settings, HOLDOUT)


def recipe_of(system: str) -> str:
    """The recipe of a system."""
    return system.split(",")[0]


def best_rate(book: Book, system: str, batch: int, *, run: bool) -> float:
    """The rate that the held-out images prefer; `run` trains what is missing for it."""
    middle, _ = (SYSTEMS | SECOND_ORDER)[system]
    trials = widening(middle)
    rate = next(trials)
    try:
        while True:
            name = f"search {system} {batch} rate {rate:g}"
            if run:
                config = config_of(recipe_of(system), batch, (*chosen(system, batch), *rated(rate)), EPOCHS)
                score = book.run(name, config, device="cpu")["accuracy"]
            else:
                found = book.of(name)
                score = found[0]["accuracy"] if found else None
            rate = trials.send(score)
    except StopIteration as end:
        return float(end.value)


def search(book: Book) -> None:
    """A rate for each system."""
    for batch in BATCHES:
        for system in SYSTEMS:
            best_rate(book, system, batch, run=True)


def table(book: Book) -> None:
    """Seeds that no rate was chosen with."""
    for batch in BATCHES:
        for seed in SEEDS:
            for system in SYSTEMS:
                show(book, "table", system, batch, seed)


def show(book: Book, part: str, system: str, batch: int, seed: int) -> None:
    """A system at the rate of its search."""
    rate = best_rate(book, system, batch, run=False)
    config = config_of(recipe_of(system), batch, (*chosen(system, batch), *rated(rate)), EPOCHS)
    book.run(f"{part} {system} {batch} rate {rate:g}", config, seed, device="cpu")


def second_order(book: Book) -> None:
    """What Shampoo and SOAP lose where Muon loses least: the huge batch, and more seeds, since those lie far apart."""
    for system in SECOND_ORDER:
        best_rate(book, system, BATCHES[0], run=True)
    for seed in MANY_SEEDS:
        for system in ("leap", "muon", *SECOND_ORDER):
            show(book, "second order", system, BATCHES[0], seed)


def left_out(book: Book, recipe: str, batch: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Techniques, and settings that leave each out of a system with the rate of the search."""
    constant = (f"workers.count={batch // LOCAL}", f"workers.local_batch={LOCAL}")
    settings = (*chosen(recipe, batch), *rated(best_rate(book, recipe, batch, run=False)))
    others = without(recipe, "mini", constant, lambda other: rated(best_rate(book, other, batch, run=False)))
    return ((name, (*settings, *changes)) for name, changes in others)


def ablation(book: Book) -> None:
    """What each technique buys; whole systems are in the table."""
    for batch in BATCHES:
        for seed in SEEDS:
            for recipe in ("leap", "sony"):
                for name, settings in left_out(book, recipe, batch):
                    config = config_of(recipe, batch, settings, EPOCHS)
                    book.run(f"ablation {recipe} {batch} without {name}", config, seed, device="cpu")


def lost_without(book: Book, recipe: str) -> dict[str, dict[int, list[float]]]:
    """What a system loses of its accuracy by technique and batch, over the seeds that both have."""
    found: dict[str, dict[int, list[float]]] = {}
    for batch in BATCHES:
        rate = best_rate(book, recipe, batch, run=False)
        whole = {row["seed"]: row["accuracy"] for row in book.of(f"table {recipe} {batch} rate {rate:g}")}
        for name, _ in left_out(book, recipe, batch):
            rows = book.of(f"ablation {recipe} {batch} without {name}")
            lost = [whole[row["seed"]] - row["accuracy"] for row in rows if row["seed"] in whole]
            found.setdefault(name, {})[batch] = lost
    return found


FIRST = ("workers.count=4", "workers.local_batch=16")
FIXED = "plan=[{epoch: 4, count: 8, local_batch: 16}, {epoch: 7, count: 16, local_batch: 16}]"
AUTO: dict[str, tuple[str, ...]] = {
    "constant 64": ("plan=[]", *FIRST),
    "64, 128, 256 by plan": (*FIRST, FIXED),
    "64 and on, auto": (*FIRST, "plan=auto", "growth.measured=2"),
    "64 and on, auto, up to four noise scales": (*FIRST, "plan=auto", "growth.measured=2", "growth.scales=4"),
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
PARTS: dict[str, Part] = {
    "search": search, "table": table, "ablation": ablation, "auto": auto, "rates": rates, "text": text,
    "second_order": second_order,
}  # fmt: skip


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
