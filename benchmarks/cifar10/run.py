"""Large batches on CIFAR-10, every synchronous system on one GPU: search, table, batch norm, speed, curves.

    PYTHONPATH=src python benchmarks/cifar10/run.py search table --data FOLDER --book results/runs.jsonl --seconds 540

Every finished run is a line of the book, and what is there is not run again: an interrupted call goes on, and a call
with `--seconds` ends in time. `summary.py` makes tables and figures from the book.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from runs import BATCHES, VALIDATION, Book, config_of

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


class Planned(NamedTuple):
    """One run of a part."""

    name: str
    recipe: str
    batch: int
    settings: tuple[str, ...] = ()
    epochs: float | None = None
    seed: int = 0
    holdout: float = 0.0


def search() -> Iterator[Planned]:
    """Three rates for each system at each of two batches, judged on images held out of training."""
    for factor in FACTORS:
        for batch in SEARCHED:
            for recipe in SYNCHRONOUS:
                rate = PEAKS[recipe] * factor
                settings = ("lr.scaling=none", f"lr.base={rate:g}")
                yield Planned(f"search {recipe} {batch} rate {rate:g}", recipe, batch, settings, holdout=VALIDATION)


def table() -> Iterator[Planned]:
    """All systems x batches x seeds with the presets' own rules."""
    for seed in range(SEEDS):
        for batch in BATCHES:
            for recipe in SYNCHRONOUS:
                yield Planned(f"table {recipe} {batch}", recipe, batch, seed=seed)


def norms() -> Iterator[Planned]:
    """Each worker's own statistics against those of the whole batch, at 16,384."""
    for seed in range(SEEDS):
        yield Planned("norms by worker 16384", "fujitsu", 16384, seed=seed)
        whole = ("workers.count=1", "workers.local_batch=16384")
        yield Planned("norms whole 16384", "fujitsu", 16384, whole, seed=seed)


def curves() -> Iterator[Planned]:
    """Fused kernels and graphs against plain torch: the same curves."""
    for seed in range(SEEDS):
        for kernels in ("auto", "plain"):
            settings = (f"kernels={kernels}", "evaluate_every=1")
            yield Planned(f"curves {kernels}", "plain", 512, settings, epochs=8, seed=seed)


def speed() -> Iterator[Planned]:
    """Time to 94 % at a batch of 2,048; the first run warms up and does not count."""
    for seed in range(21):
        yield Planned("speed", "plain", 2048, ("lr.scaling=none", "lr.base=1.6"), epochs=45, seed=seed)


PARTS = {"search": search, "table": table, "norms": norms, "curves": curves, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--data", required=True, help="the folder of CIFAR-10's batches")
    parser.add_argument("--book", type=Path, default=Path(__file__).parent / "results" / "runs.jsonl")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this long")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a GPU; on a CPU a single run takes hours.")
    book, begin = Book(options.book), time.perf_counter()
    for part in options.parts:
        for run in PARTS[part]():
            if time.perf_counter() - begin > options.seconds:
                print(f"Stopped in {part}: the time is up.")
                return
            config = config_of(run.recipe, run.batch, run.settings, run.epochs)
            book.run(run.name, config, options.data, run.seed, run.holdout)


if __name__ == "__main__":
    main()
