"""Islands on one GPU: loss by their number, H and outer rate on a text of books, and local SGD on CIFAR-10.

    PYTHONPATH=src python benchmarks/islands/table.py books --data books.txt --seconds 1500
    PYTHONPATH=src python benchmarks/islands/table.py cifar10 --data FOLDER --seconds 1500
    PYTHONPATH=src python benchmarks/islands/table.py summary
    PYTHONPATH=src python benchmarks/islands/table.py books summary --check       # rehearsal: tiny, on a CPU

Every finished run is a line of its book under results/, and what is there is not run again: a series that is cut short
goes on, and its runs come in an order in which the beginning is of use by itself.

Books, in equal tokens (512 sequences a step): the synchronous run; the main column (H = 30) for every M; the outer rate
by M; two more seeds of the main column at its best rate; the other H, from the one that says most; plain averaging and
a synchronous beginning. CIFAR-10 at a batch of 16,384: `localsgd` and `postlocal` beside `sony` and `fujitsu`, with
moving batch-norm statistics and with those of the last batch. (Moving statistics that islands keep apart have the mean
of those that they would share, since a moving average is linear: that is no run of its own.)
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "sequence"), str(HERE.parent / "cifar10")]

import books  # noqa: E402 - lies beside
import runs  # noqa: E402

BATCH, MAIN = 512, 30
COUNTS, EVERY = (8, 2, 4, 1), (10, 100, 1, 300)
RATES, FIRST = (0.4, 0.7, 1.0), 0.7
SEEDS = 3
LARGE = 16_384


class Cell:
    """Runs of one number of islands, H and rule, in the book of `benchmarks/sequence/books.py`."""

    def __init__(self, epochs: float, check: bool) -> None:
        self.epochs = epochs
        batch, rate = (32, 1e-2) if check else (BATCH, 1e-3)
        sizes = ("workers.count=8", "workers.local_batch=4") if check else books.sizes(batch)
        self.base = (*sizes, f"lr.base={rate}", "lr.scaling=none")

    def run(self, label: str, *settings: str, seed: int = 0) -> books.Run:
        """Return a run by its label."""
        return books.Run(label, "adamw", (*self.base, *settings), self.epochs, seed)

    def nesterov(self, count: int, every: int, rate: float, seed: int = 0) -> books.Run:
        """Return DiLoCo at an outer rate."""
        outer = f"islands.outer={{name: nesterov, lr: {rate}, momentum: 0.9}}"
        meet = (f"islands.count={count}", f"islands.every={every}", outer)
        return self.run(f"M={count} H={every} outer={rate}", *meet, seed=seed)

    def average(self, count: int, every: int, begin: float = 0.0) -> books.Run:
        """Return plain averaging, synchronous for a part of the run."""
        meet = (f"islands.count={count}", f"islands.every={every}", f"islands.begin={begin * self.epochs}")
        return self.run(f"M={count} H={every} average" + (f" from {begin}" if begin else ""), *meet)


def bits(book: books.Book, run: books.Run) -> float:
    """Return what a run reached; infinite where it is not there or failed."""
    return book.rows.get((run.name, run.seed), {}).get("bits_per_byte") or math.inf


def best_rate(book: books.Book, cell: Cell, count: int) -> float:
    """Return the outer rate that is best for a number of islands, as far as the book knows."""
    return min(RATES, key=lambda rate: (bits(book, cell.nesterov(count, MAIN, rate)), rate != FIRST))


def in_order(book: books.Book, cell: Cell) -> Iterator[books.Run]:
    """Yield all runs, what matters most first; best rates are looked up when their turn comes."""
    yield cell.run("synchronous")
    for count in COUNTS:
        yield cell.nesterov(count, MAIN, FIRST)
    for count in COUNTS:
        for rate in RATES:
            yield cell.nesterov(count, MAIN, rate)
    for seed in range(1, SEEDS):
        yield cell.run("synchronous", seed=seed)
        for count in COUNTS:
            yield cell.nesterov(count, MAIN, best_rate(book, cell, count), seed)
    for every in EVERY:
        for count in COUNTS:
            yield cell.nesterov(count, every, best_rate(book, cell, count))
    for begin in (0.0, 0.5):
        for count in COUNTS[:-1]:
            yield cell.average(count, MAIN, begin)


def run_books(options: argparse.Namespace, begun: float) -> None:
    """Run what the book of the books lacks."""
    device = torch.device("cpu" if options.check else "cuda")
    book, cell = books.Book(options.book, options.data, device, options.check), Cell(options.epochs, options.check)
    for run in in_order(book, cell):
        if time.perf_counter() - begun < options.seconds:
            book.run(run)


def run_cifar10(options: argparse.Namespace, begun: float) -> None:
    """Run what the book of the images lacks, seed by seed."""
    book = runs.Book(options.images)
    for seed in range(SEEDS):
        for recipe in ("localsgd", "postlocal", "sony", "fujitsu"):
            for statistic in ("moving", "last_batch") if recipe.endswith("sgd") or recipe == "postlocal" else ("",):
                settings = (f"norm.statistics={statistic}",) if statistic else ()
                if time.perf_counter() - begun < options.seconds:
                    config = runs.config_of(recipe, 256 if options.check else LARGE, settings, options.image_epochs)
                    book.run(f"{recipe} {LARGE} {statistic}".strip(), config, options.data, seed)


def summary(options: argparse.Namespace) -> None:
    """Print the tables: bits per byte by M and H at the best outer rate, rates by M, and accuracies."""
    book, cell = books.Book(options.book, "", torch.device("cpu"), options.check), Cell(options.epochs, options.check)
    counts, columns = sorted(COUNTS), sorted((*EVERY, MAIN))
    print(f"synchronous: {_cell([bits(book, cell.run('synchronous', seed=seed)) for seed in range(SEEDS)])}\n")
    print(f"| M | {' | '.join(f'H = {every}' for every in columns)} | average | from half | outer rate |")
    print("|--:|" + "--:|" * (len(columns) + 3))
    for count in counts:
        rate = best_rate(book, cell, count)
        cells = [
            _cell([bits(book, cell.nesterov(count, every, rate, seed)) for seed in range(SEEDS)]) for every in columns
        ]
        means = [_cell([bits(book, cell.average(count, MAIN, begin))]) for begin in (0.0, 0.5)]
        tried = ", ".join(f"{each}: {_cell([bits(book, cell.nesterov(count, MAIN, each))])}" for each in RATES)
        print(f"| {count} | {' | '.join([*cells, *means])} | {tried} |")
    rows: dict[str, list[Any]] = {}
    for name, row in runs.Book(options.images).rows.items():
        rows.setdefault(name.rpartition(" seed ")[0], []).append(row["accuracy"])
    for name, values in rows.items():
        seen = [100 * value for value in values if value is not None]
        print(f"{name}: {statistics.mean(seen):.2f} % (n = {len(seen)})" if seen else f"{name}: failed")


def _cell(values: list[float]) -> str:
    seen = [value for value in values if math.isfinite(value)]
    if not seen:
        return ""
    spread = f" ± {(max(seen) - min(seen)) / 2:.3f}" if len(seen) > 1 else ""
    return f"{statistics.mean(seen):.3f}{spread}"


def main() -> None:
    """Do what was asked for, in that order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["books", "cifar10", "summary"])
    parser.add_argument("--data", default="books.txt", help="the text, or the folder of CIFAR-10's batches")
    parser.add_argument("--book", type=Path, default=HERE / "results" / "books.jsonl")
    parser.add_argument("--images", type=Path, default=HERE / "results" / "cifar10.jsonl")
    parser.add_argument("--epochs", type=float, default=1.0, help="of the books")
    parser.add_argument("--image-epochs", type=float, default=None, help="of CIFAR-10; the preset's 30 by default")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after this")
    parser.add_argument("--check", action="store_true", help="small, on a CPU")
    options = parser.parse_args()
    begun = time.perf_counter()
    for part in options.parts:
        if part == "summary":
            summary(options)
        else:
            (run_books if part == "books" else run_cifar10)(options, begun)


if __name__ == "__main__":
    main()
