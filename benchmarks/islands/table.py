"""Islands on one GPU: loss by their number, H and outer rate on a text of books, and local SGD on CIFAR-10.

    PYTHONPATH=src python benchmarks/islands/table.py books summary --data books.txt.xz --seconds 340
    PYTHONPATH=src python benchmarks/islands/table.py cifar10 summary --data FOLDER --seconds 340
    PYTHONPATH=src python benchmarks/islands/table.py summary
    PYTHONPATH=src python benchmarks/islands/table.py books summary --check       # rehearsal: tiny, on a CPU

Every finished run is a line of its book under results/, and what is there is not run again: a series that is cut short
goes on with the same command, and its runs come in an order in which the beginning is of use by itself. A run that
would not end within `--seconds`, as the longest before it says, is not begun.

Books, in equal tokens (256 sequences of 256 bytes a step, half a pass, 406 steps): the main column (H = 30, outer rate
0.7) for every M beside the synchronous run, three seeds; the outer rate by M, and the other seeds where another one is
best; the other H, for eight islands first; plain averaging and a synchronous beginning; eight islands in runs of two
and four times the length. An H200 took 53 ms for a synchronous step of 512 sequences and 68 ms for one of eight
islands, so a run is some 11 to 15 s, the main column 200 s, and 340 s hold it and the rates.

CIFAR-10 at a batch of 16,384: `localsgd` and `postlocal` beside `sony` and `fujitsu`, with moving batch-norm statistics
and with those of the last batch. (Moving statistics that islands keep apart have the mean of those that they would
share, since a moving average is linear: that is no run of its own.)
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "sequence"), str(HERE.parent / "cifar10")]

import books  # noqa: E402 - lies beside
import runs  # noqa: E402

from bigstep.engine.ranks import Ranks  # noqa: E402

BATCH, MAIN = 256, 30
COUNTS, EVERY = (8, 2, 4, 1), (10, 100, 1, 300)
RATES, FIRST = (0.4, 0.7, 1.0), 0.7
SEEDS = 3
LONGER = (2, 4)
"""How many times the length some runs have, to see whether the gap closes."""
FIRST_RUN_S = 30.0
"""What the first run of a call is given: it also reads the text and compiles."""
LARGE = 16_384
OVER = "the time is over; the same command goes on from here"


class Cell:
    """Runs of one number of islands, H and rule, in the book of `benchmarks/sequence/books.py`."""

    rates: tuple[float, ...] = RATES
    """Outer rates that are tried."""

    def __init__(self, epochs: float, check: bool) -> None:
        self.epochs, self.check = epochs, check
        batch, rate = (32, 1e-2) if check else (BATCH, 1e-3)
        sizes = ("workers.count=8", "workers.local_batch=4") if check else books.sizes(batch)
        self.base = (*sizes, f"lr.base={rate}", "lr.scaling=none")

    def run(self, label: str, *settings: str, seed: int = 0) -> books.Run:
        """Return a run by its label."""
        return books.Run(label, "adamw", (*self.base, *settings), self.epochs, seed)

    def longer(self, times: int) -> Cell:
        """Return the same in longer runs."""
        return Cell(self.epochs * times, self.check)

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
    return book.rows.get((run.name, run.seed, run.epochs), {}).get("bits_per_byte") or math.inf


def best_rate(book: books.Book, cell: Cell, count: int) -> float:
    """Return the outer rate that is best for a number of islands, as far as the book knows."""
    return min(cell.rates, key=lambda rate: (bits(book, cell.nesterov(count, MAIN, rate)), rate != FIRST))


def in_order(book: books.Book, cell: Cell) -> Iterator[books.Run]:
    """Yield all runs, what matters most first; best rates are looked up when their turn comes."""
    for seed in range(SEEDS):
        yield cell.run("synchronous", seed=seed)
        for count in COUNTS:
            yield cell.nesterov(count, MAIN, FIRST, seed)
    for count in COUNTS:
        for rate in cell.rates:
            yield cell.nesterov(count, MAIN, rate)
    for seed in range(1, SEEDS):
        for count in COUNTS:
            yield cell.nesterov(count, MAIN, best_rate(book, cell, count), seed)
    for every in EVERY:
        yield cell.nesterov(COUNTS[0], every, best_rate(book, cell, COUNTS[0]))
    for begin in (0.0, 0.5):
        yield cell.average(COUNTS[0], MAIN, begin)
    for times in LONGER:
        yield from long_runs(cell.longer(times), best_rate(book, cell, COUNTS[0]))
    for every in EVERY:
        for count in COUNTS[1:]:
            yield cell.nesterov(count, every, best_rate(book, cell, count))
    for begin in (0.0, 0.5):
        for count in COUNTS[1:-1]:
            yield cell.average(count, MAIN, begin)


def long_runs(cell: Cell, rate: float) -> list[books.Run]:
    """Return what is compared in runs of another length."""
    averages = [cell.average(COUNTS[0], MAIN, begin) for begin in (0.0, 0.5)]
    return [cell.run("synchronous"), cell.nesterov(COUNTS[0], MAIN, rate), *averages]


@contextlib.contextmanager
def unpacked(data: str) -> Iterator[str]:
    """Lend out a text as a plain file."""
    if not data.endswith(".xz"):
        yield data
        return
    with tempfile.NamedTemporaryFile(suffix=".txt") as plain, lzma.open(data) as packed:
        shutil.copyfileobj(packed, plain)
        plain.flush()
        yield plain.name


def run_books(options: argparse.Namespace, begun: float) -> None:
    """Run what the book of the books lacks."""
    ranks = Ranks(device=torch.device("cpu" if options.check else "cuda"))
    with unpacked(options.data) as text:
        fill(books.Book(options.book, text, ranks, options.check), Cell(options.epochs, options.check), options, begun)


def fill(book: books.Book, cell: Cell, options: argparse.Namespace, begun: float) -> None:
    """Run until the book is full or the time is over."""
    longest, shortest = FIRST_RUN_S, min(run.epochs for run in in_order(book, cell))
    for run in in_order(book, cell):
        if (run.name, run.seed, run.epochs) in book.rows:
            continue
        began = time.perf_counter()
        length = run.epochs / shortest
        if began - begun + longest * length > options.seconds:
            print(OVER, flush=True)
            return
        book.run(run)
        took = (time.perf_counter() - began) / length
        longest = took if longest == FIRST_RUN_S else max(longest, took)


def run_cifar10(options: argparse.Namespace, begun: float) -> None:
    """Run what the book of the images lacks, seed by seed."""
    book, longest = runs.Book(options.images), FIRST_RUN_S
    for seed in range(SEEDS):
        for recipe in ("localsgd", "postlocal", "sony", "fujitsu"):
            for statistic in ("moving", "last_batch") if recipe in ("localsgd", "postlocal") else ("",):
                settings = (f"norm.statistics={statistic}",) if statistic else ()
                name, length = f"{recipe} {LARGE} {statistic}".strip(), options.image_epochs
                planned = runs.Planned(name, recipe, LARGE, settings, length, seed)
                if planned.called in book.rows:
                    continue
                if time.perf_counter() - begun + longest > options.seconds:
                    print(OVER, flush=True)
                    return
                row = runs.trained(planned, options.data, tiny=options.check)
                book.add(row, shared=False)
                longest = row["wall_s"] if longest == FIRST_RUN_S else max(longest, row["wall_s"])


def summary(options: argparse.Namespace) -> None:
    """Print the tables of the text, and accuracies."""
    tabulate(books.Book(options.book, "", Ranks(), options.check), Cell(options.epochs, options.check))
    rows: dict[str, list[Any]] = {}
    for name, row in runs.Book(options.images).rows.items():
        rows.setdefault(name.rpartition(" seed ")[0], []).append(row["accuracy"])
    for name, values in rows.items():
        seen = [100 * value for value in values if value is not None]
        print(f"{name}: {statistics.mean(seen):.2f} % (n = {len(seen)})" if seen else f"{name}: failed")


def tabulate(book: books.Book, cell: Cell) -> None:
    """Print bits per byte by M and H at the best outer rate, rates by M, and longer runs."""
    counts, columns = sorted(COUNTS), sorted((*EVERY, MAIN))
    print(f"synchronous: {shown([bits(book, cell.run('synchronous', seed=seed)) for seed in range(SEEDS)])}\n")
    print(f"| M | {' | '.join(f'H = {every}' for every in columns)} | average | from half | outer rate |")
    print("|--:|" + "--:|" * (len(columns) + 3))
    for count in counts:
        rate = best_rate(book, cell, count)
        cells = [
            shown([bits(book, cell.nesterov(count, every, rate, seed)) for seed in range(SEEDS)]) for every in columns
        ]
        means = [shown([bits(book, cell.average(count, MAIN, begin))]) for begin in (0.0, 0.5)]
        tried = ", ".join(f"{each}: {shown([bits(book, cell.nesterov(count, MAIN, each))])}" for each in cell.rates)
        print(f"| {count} | {' | '.join([*cells, *means])} | {tried} |")
    print(f"\nH = {MAIN}, {COUNTS[0]} islands:\n\n| length | synchronous | Nesterov | average | from half |")
    print("|--:|--:|--:|--:|--:|")
    for times in (1, *LONGER):
        found = [bits(book, run) for run in long_runs(cell.longer(times), best_rate(book, cell, COUNTS[0]))]
        print(f"| {times} | {' | '.join(shown([each]) for each in found)} |")


def shown(values: list[float]) -> str:
    """Show the mean of what is there, and half its range."""
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
    parser.add_argument("--epochs", type=float, default=0.5, help="of the books")
    parser.add_argument("--image-epochs", type=float, default=None, help="of CIFAR-10; the preset's 30 by default")
    parser.add_argument("--seconds", type=float, default=1e9, help="what the call may take")
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
