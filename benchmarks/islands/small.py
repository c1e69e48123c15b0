"""Islands by number, H and outer rate with a small GPT on a text of books, on one CPU core, in equal tokens.

    PYTHONPATH=src python benchmarks/islands/small.py --data books.txt.xz [--seconds 3000]     # about an hour in all
    PYTHONPATH=src python benchmarks/islands/small.py summary > benchmarks/islands/results/small.md

The table of `table.py` at a size that a CPU can do: a GPT of 120,000 weights (two blocks of width 64), windows of 64
bytes, 32 of them a step in eight workers, 600 steps and for the last rows two and four times as many, every window
once. The inner rate is searched first, for the synchronous run and for eight islands, whose rate goes for all of them.
It goes on from its book.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import table
import torch
from table import Cell, books, fill, tabulate, unpacked
from torch import nn

from bigstep import recipes
from bigstep.config import RunConfig
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.data.pair import DataPair
from bigstep.engine.build import Own
from bigstep.engine.ranks import Ranks
from bigstep.models import GPT

HERE = Path(__file__).parent
LENGTH, BATCH, WORKERS, STEPS = 64, 32, 8, 600
WINDOWS = STEPS * BATCH * max(table.LONGER)
"""Of the longest run, which sees each once."""
TEST_WINDOWS = 1024
"""Of the held-out tenth of the text, evenly over it."""
INNER_RATES = (4e-3, 8e-3, 2e-3, 1.6e-2)


class Small(books.Book):
    """Runs of the small network."""

    def config(self, run: books.Run) -> RunConfig:
        """Return the preset for books with what makes it small."""
        quiet = ["checkpoint.every=0", "checkpoint.seconds=0", "evaluate_every=1000", f"seed={run.seed}"]
        settings = [*quiet, "data.drop_last=true", f"data.length={LENGTH}", "measure_noise=false"]
        return apply_settings(
            stretch(apply_settings(recipes.load(run.preset, "books"), settings), run.epochs), run.settings
        )

    def pair(self, config: RunConfig) -> Any:
        """Return as many windows as the longest run sees, from everywhere in the text, and some of the rest."""
        if not self.pairs:
            pair = open_data("text", self.data, 0.0, 0, length=LENGTH, vocabulary=config.data.vocabulary)
            parts = [
                part.subset(torch.linspace(0, len(part) - 1, count).long())
                for part, count in ((pair.train, WINDOWS), (pair.test, TEST_WINDOWS))
            ]
            self.pairs[0.0] = DataPair(*parts)
        return self.pairs[0.0]

    def own(self, pair: Any) -> Own:
        """Return the network and the windows."""

        def fresh(_: nn.Module) -> nn.Module:  # called behind the run's own seed
            return GPT(vocabulary=256, length=LENGTH, depth=2, width=64, heads=4)

        return Own(nn.Identity(), (pair.train, pair.test), change=fresh)


class SmallCell(Cell):
    """Runs of the small network at a rate."""

    rates = (0.2, *table.RATES)

    def __init__(self, epochs: float, rate: float) -> None:
        self.epochs, self.check, self.rate = epochs, False, rate
        sizes = (f"workers.count={WORKERS}", f"workers.local_batch={BATCH // WORKERS}")
        self.base = (*sizes, f"lr.base={rate:g}", "lr.scaling=none")

    def run(self, label: str, *settings: str, seed: int = 0) -> books.Run:
        """Return a run by its label and rate."""
        return super().run(f"{label}, rate {self.rate:g}", *settings, seed=seed)

    def dropped(self, seed: int = 0) -> books.Run:
        """Return eight islands that miss half of their meetings."""
        whole = self.nesterov(table.COUNTS[0], table.MAIN, table.FIRST, seed)
        label = f"half of the meetings lost, rate {self.rate:g}"
        return whole._replace(name=label, settings=(*whole.settings, "islands.drop=0.5"))

    def longer(self, times: int) -> SmallCell:
        """Return the same in longer runs."""
        return SmallCell(self.epochs * times, self.rate)


def pairs(cell: SmallCell) -> list[tuple[books.Run, books.Run]]:
    """Return runs with all meetings and with half of them: three seeds, then longer ones."""
    chosen = [(cell, seed) for seed in range(table.SEEDS)] + [(cell.longer(times), 0) for times in table.LONGER]
    count, every, rate = table.COUNTS[0], table.MAIN, table.FIRST
    return [(each.nesterov(count, every, rate, seed), each.dropped(seed)) for each, seed in chosen]


def main() -> None:
    """Search the rate, fill the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["run", "summary"], default="run")
    parser.add_argument("--data", default="books.txt", help="the text")
    parser.add_argument("--book", type=Path, default=HERE / "results" / "small.jsonl")
    parser.add_argument("--seconds", type=float, default=1e9, help="what the call may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, epochs = time.perf_counter(), 1.0 / max(table.LONGER)
    with unpacked(options.data if options.part == "run" else "") as text:
        book = Small(options.book, text, Ranks(), small=True)
        cells = {rate: SmallCell(epochs, rate) for rate in INNER_RATES}
        kinds = {
            "synchronous": {rate: cell.run("synchronous") for rate, cell in cells.items()},
            "eight islands": {
                rate: cell.nesterov(table.COUNTS[0], table.MAIN, table.FIRST) for rate, cell in cells.items()
            },
        }
        if options.part == "run":
            for trial in (trial for trials in kinds.values() for trial in trials.values()):
                book.run(trial)
        best = {kind: min(trials, key=lambda rate: table.bits(book, trials[rate])) for kind, trials in kinds.items()}
        if options.part == "run":
            for seed in range(1, table.SEEDS):
                book.run(cells[best["synchronous"]].run("synchronous", seed=seed))
            fill(book, cells[best["eight islands"]], options, begun)
            for run in (run for runs in pairs(cells[best["eight islands"]]) for run in runs):
                book.run(run)
    for kind, trials in kinds.items():
        told = ", ".join(f"{table.bits(book, trials[rate]):.3f} at {rate:g}" for rate in sorted(trials))
        print(f"- {kind}, bits per byte by inner rate: {told}")
    own = [cells[best["synchronous"]].run("synchronous", seed=seed) for seed in range(table.SEEDS)]
    print(f"- synchronous at its own best rate: {table.shown([table.bits(book, run) for run in own])}\n")
    tabulate(book, cells[best["eight islands"]])
    print("\nHalf of the meetings lost, eight islands, H = 30; perplexity is 2 to the bits:\n")
    print("| steps | seed | all meetings | half of them | perplexity |\n|--:|--:|--:|--:|--:|")
    for all_of_them, half in pairs(cells[best["eight islands"]]):
        whole, lost = table.bits(book, all_of_them), table.bits(book, half)
        steps, more = round(STEPS * half.epochs / epochs), 2 ** (lost - whole) - 1
        print(f"| {steps:,} | {half.seed} | {whole:.3f} | {lost:.3f} | {more:+.1%} |")


if __name__ == "__main__":
    main()
