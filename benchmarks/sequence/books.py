"""Rules, batches and islands on a text of books, on one GPU, in equal tokens.

    PYTHONPATH=src python benchmarks/sequence/books.py table --data books.txt --book results/books.jsonl
    PYTHONPATH=src python benchmarks/sequence/books.py islands --data books.txt --book results/runs.jsonl
    PYTHONPATH=src python benchmarks/sequence/books.py summary --book results/books.jsonl

`table` is the whole study of rules by batch in one command: for a batch it looks for the rate of each rule, on half of
the tokens and judged on held-out training text, until the best rate has a worse one on either side; then it trains each
rule with its rate and judges on windows spread over the test text. Batch after batch with one seed, then the other
seeds: what is there when the time is over (`--seconds`) is a table with fewer batches or fewer seeds. With the 10.5
million tokens of the default (a fifth of 64 MB, gpt-10m) a run should take an H200 some 6 seconds and a trial some 3:
about 270 s for a table with one seed, 450 s with three. `islands` is the table of islands by steps between meetings. A
run is a preset `books` with settings; what it gave is one line of JSON in the book, and a line that is there is not run
again, so the same command goes on with a series that was cut short. `--check` rehearses it on a CPU, on a few hundred
windows.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rates import best_power, next_power

from bigstep import recipes
from bigstep.bench.suites import LARS_ON_TEXT, SGD_ON_TEXT
from bigstep.config import RunConfig
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.data.pair import DataPair
from bigstep.engine.build import Own, build
from bigstep.engine.loop import train
from bigstep.engine.observers.base import Audience
from bigstep.engine.observers.noise import NoiseWatch
from bigstep.engine.ranks import Ranks
from bigstep.errors import BigstepError

LOCAL = 8
RULES = {
    "adamw": ("adamw", (), 1e-3, 2.0),
    "lamb": ("lamb", (), 4e-3, 2.0),
    "sgd": ("adamw", SGD_ON_TEXT, 0.03, 3.0),
    "lars": ("adamw", LARS_ON_TEXT, 0.5, 3.0),
}
"""A rule: its preset, what is changed in it, a first rate at a batch of 64, the factor between two that are tried."""
BATCHES = (64, 1024, 256, 16)
"""In the order in which they are worth having."""
TEST_WINDOWS = 2048
"""Of the test text, evenly over it: an evaluation of all would take as long as a short run."""
SEARCHED = 0.5
"""The part of the tokens on which rates are searched."""
TRIALS = 7
"""Of one rule at one batch, at most."""
HELD_OUT = "data.holdout=0.05"


class Run(NamedTuple):
    """A line of the book to come."""

    name: str
    preset: str
    settings: tuple[str, ...]
    epochs: float
    seed: int = 0


def sizes(batch: int, local: int = LOCAL) -> tuple[str, ...]:
    return f"workers.count={batch // local}", f"workers.local_batch={local}"


def table(book: Book, epochs: float, seeds: int) -> Iterator[Run]:
    """Rates, then results, batch by batch; then the other seeds. Each run depends on those that the book holds."""
    for batch in book.batches:
        for rule in book.rules:
            centre = centre_of(book, rule, batch, epochs * SEARCHED)
            while (power := next_power(book.scores(rule, batch, epochs * SEARCHED), TRIALS, centre)) is not None:
                yield trial(book, rule, batch, power, epochs * SEARCHED)
        yield from column(book, batch, epochs, seed=0)
    for seed in range(1, seeds):
        for batch in book.batches:
            yield from column(book, batch, epochs, seed)


def centre_of(book: Book, rule: str, batch: int, epochs: float) -> int:
    """Return the power that was best at the batch before this one, where the search begins."""
    before = book.batches[: book.batches.index(batch)]
    found = [scores for earlier in before if (scores := book.scores(rule, earlier, epochs))]
    return best_power(found[-1]) if found else 0


def rate_of(book: Book, rule: str, batch: int, power: int) -> float:
    _, _, rate, factor = book.rules[rule]
    return float(book.faster * rate * math.sqrt(min(batch, 4096) / 64) * factor**power)


def trial(book: Book, rule: str, batch: int, power: int, epochs: float) -> Run:
    """A rate that is tried, judged on training text that was held out."""
    preset, changes, _, _ = book.rules[rule]
    fixed = (f"lr.base={rate_of(book, rule, batch, power):.4g}", "lr.scaling=none", HELD_OUT)
    return Run(f"rate {rule} {batch} {power:+d}", preset, (*changes, *sizes(batch, book.local), *fixed), epochs)


def column(book: Book, batch: int, epochs: float, seed: int) -> Iterator[Run]:
    """All rules at one batch, each with the rate that was best there."""
    for rule, (preset, changes, _, _) in book.rules.items():
        rate = rate_of(book, rule, batch, best_power(book.scores(rule, batch, epochs * SEARCHED)))
        fixed = (f"lr.base={rate:.4g}", "lr.scaling=none")
        yield Run(f"batch {rule} {batch}", preset, (*changes, *sizes(batch, book.local), *fixed), epochs, seed)


def islands(book: Book, epochs: float, seeds: int) -> Iterator[Run]:
    """DiLoCo with AdamW inside, M islands that meet every H steps: what matters most first."""
    base = (*sizes(512), "lr.base=0.001", "lr.scaling=none")

    def run(label: str, count: int, every: int, *more: str) -> Run:
        meet = (f"islands.count={count}", f"islands.every={every}", *more)
        return Run(f"islands M={count} H={every} {label}", "adamw", (*base, *meet), epochs)

    def outer(rate: float) -> str:
        return f"islands.outer={{name: nesterov, lr: {rate}, momentum: 0.9}}"

    yield Run("islands sync", "adamw", base, epochs)
    for count in (8, 2, 4):
        yield run("nesterov 0.7", count, 30, outer(0.7))
    yield run("average", 8, 30)
    yield run("average from half", 8, 30, f"islands.begin={0.5 * epochs}")
    yield run("nesterov 0.7", 8, 100, outer(0.7))
    yield run("nesterov 0.7", 8, 10, outer(0.7))
    yield run("nesterov 0.7 int4", 8, 30, outer(0.7), "islands.codec=int4")
    yield run("nesterov 0.7 streaming", 8, 30, outer(0.7), "islands.fragments=3", "islands.overlap=5")
    for count in (8, 2, 1):
        for rate in (0.4, 1.0):
            yield run(f"nesterov {rate}", count, 30, outer(rate))
    for every in (10, 100, 1):
        for count in (2, 4, 8):
            yield run("nesterov 0.7", count, every, outer(0.7))


class Book:
    """Lines by name and seed; the text is read once and stays on the device."""

    faster = 1.0
    """What the first rates are multiplied by: smaller networks take larger ones."""
    local = LOCAL
    """Sequences of a worker."""

    def __init__(self, path: Path, data: str, ranks: Ranks, small: bool) -> None:
        self.path, self.ranks, self.small = path, ranks, small
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = {(row["name"], row["seed"], row["epochs"]): row for row in map(json.loads, lines)}
        self.pairs: dict[float, Any] = {}
        self.data = data
        self.batches = (8, 16) if small else BATCHES
        self.rules = RULES

    def scores(self, rule: str, batch: int, epochs: float) -> dict[int, float | None]:
        """What the rates of a rule gave that were tried at a batch, by power."""
        wanted = f"rate {rule} {batch} "
        return {
            int(name.removeprefix(wanted)): row.get("bits_per_byte")
            for (name, _, length), row in self.rows.items()
            if name.startswith(wanted) and length == epochs
        }

    def config(self, run: Run) -> RunConfig:
        quiet = ["checkpoint.every=0", "checkpoint.seconds=0", "evaluate_every=1000", f"seed={run.seed}"]
        preset = recipes.load(run.preset, "mini" if self.small else "books")
        config = stretch(apply_settings(preset, [*quiet, "data.drop_last=true"]), run.epochs)
        return apply_settings(config, run.settings)

    def pair(self, config: RunConfig) -> Any:
        """Training and test text, or training text and what is held out of it."""
        where = config.data
        if where.holdout not in self.pairs:
            name, path = ("shakespeare", "") if self.small else ("text", self.data)
            length, vocabulary = where.length, where.vocabulary
            pair = open_data(name, path, where.holdout, 0, length=length, vocabulary=vocabulary)
            train = pair.train.subset(torch.arange(600)) if self.small else pair.train
            windows = min(32 if self.small else TEST_WINDOWS, len(pair.test))
            some = torch.linspace(0, len(pair.test) - 1, windows).long()
            pair = DataPair(train, pair.test.subset(some))
            self.pairs[where.holdout] = pair
        return self.pairs[where.holdout]

    def own(self, pair: Any) -> Own:
        """What is not the preset's."""
        return Own(data=(pair.train, pair.test))

    def run(self, run: Run) -> None:
        if (run.name, run.seed, run.epochs) in self.rows:
            return
        if self.ranks.device.type == "cuda":  # the graphs of the run before have memory of their own
            gc.collect()
            torch.cuda.empty_cache()
        config = self.config(run)
        pair = self.pair(config)
        row: dict[str, Any] = {"name": run.name, "seed": run.seed, "epochs": run.epochs, "settings": run.settings}
        started = time.perf_counter()
        try:
            built = build(config, self.ranks, self.own(pair))
            noise = NoiseWatch(config.epochs)
            ending = train(built, Audience([noise]))
            row |= ending.evaluation.facts() | {
                "loss": ending.loss,
                "steps": built.state.position.step,
                "samples": built.sampler.samples_at(built.state.position),
                "train_s": built.state.seconds,
                "noise_scale": noise.scale.value,
                "kernels": str(built.kernels),
            }
            built.close()
        except (BigstepError, torch.OutOfMemoryError) as error:
            row["error"] = str(error)[:200]
        row["seconds"] = time.perf_counter() - started
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.rows[(run.name, run.seed, run.epochs)] = row
        if not self.ranks.first:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        bits, steps = row.get("bits_per_byte"), row.get("steps")
        print(
            f"{run.name:44} {bits} bits/byte  {steps} steps  {row['seconds']:.1f} s  {row.get('error', '')}", flush=True
        )


def summary(book: Book) -> None:
    """Print the table, what the rates gave, the islands."""
    for epochs in sorted({key[2] for key in book.rows if key[0].startswith("batch ")}):
        tabulate(book, epochs)
    for title in ("rate", "islands"):
        rows = sorted((key, row) for key, row in book.rows.items() if key[0].startswith(title))
        if rows:
            print(f"\n| {title} | seed | bits per byte | steps | seconds |\n|---|---|---|---|---|")
        for (name, seed, _), row in rows:
            print(f"| {name} | {seed} | {_bits(row)} | {row.get('steps')} | {row['seconds']:.1f} |")


def tabulate(book: Book, epochs: float) -> None:
    """Bits per byte by rule and batch: the median over seeds and their range; beside it steps and noise scale."""
    found = {key: row for key, row in book.rows.items() if key[0].startswith("batch ") and key[2] == epochs}
    batches = sorted({int(name.split()[2]) for name, _, _ in found})
    rules = list(dict.fromkeys(name.split()[1] for name, _, _ in found))
    print(
        f"\nBits per byte after {epochs:g} of a pass, median over seeds (range); * best rate at an end of the search.\n"
    )
    print(f"| batch | steps | {' | '.join(rules)} | noise scale | seeds |\n|---:|---:|{'---:|' * (len(rules) + 2)}")
    for batch in batches:
        cells, noise, counts, steps = [], [], set(), ""
        for rule in rules:
            rows = [row for (name, _, _), row in found.items() if name == f"batch {rule} {batch}"]
            bits = sorted(row["bits_per_byte"] for row in rows if row.get("bits_per_byte") is not None)
            spread = f" ({bits[0]:.3f} to {bits[-1]:.3f})" if len(bits) > 1 else ""
            tried = book.scores(rule, batch, epochs * SEARCHED)
            edge = "*" if tried and best_power(tried) in (min(tried), max(tried)) else ""
            cells.append(f"{statistics.median(bits):.3f}{edge}{spread}" if bits else "diverged" if rows else "")
            noise += [row["noise_scale"] for row in rows if row.get("noise_scale")]
            counts |= {len(rows)} if rows else set()
            steps = next((f"{row['steps']:,}" for row in rows if row.get("steps")), steps)
        scale = f"{statistics.median(noise):.2g}" if noise else ""
        print(f"| {batch:,} | {steps} | {' | '.join(cells)} | {scale} | {'-'.join(map(str, sorted(counts)))} |")
    for rule in rules:
        medians = {batch: [row["bits_per_byte"] for (name, _, _), row in found.items()
                           if name == f"batch {rule} {batch}" and row.get("bits_per_byte") is not None]
                   for batch in batches}  # fmt: skip
        level = {batch: statistics.median(bits) for batch, bits in medians.items() if bits}
        if level:
            near = max(batch for batch, bits in level.items() if bits <= min(level.values()) + 0.05)
            print(f"{rule}: largest batch within 0.05 bits of its best: {near:,}")


def _bits(row: dict[str, Any]) -> str:
    bits = row.get("bits_per_byte")
    return str(row.get("error", "not finite")) if bits is None else f"{bits:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("series", nargs="+", choices=["table", "islands", "summary"])
    parser.add_argument("--data", default="books.txt")
    parser.add_argument("--book", type=Path, default=Path("results/books.jsonl"))
    parser.add_argument("--epochs", type=float, default=0.2, help="passes over the text, of every run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after this")
    parser.add_argument("--check", action="store_true", help="small, on a CPU")
    options = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cpu" if options.check or options.series == ["summary"] else "cuda")
    book = Book(options.book, options.data, Ranks(device=device), options.check)
    for series in (each for each in options.series if each != "summary"):
        planned = {"table": table, "islands": islands}[series]
        for run in planned(book, 0.08 if options.check else options.epochs, options.seeds):
            if time.perf_counter() - begin > options.seconds:
                print("the time is over; the same command goes on from here", flush=True)
                break
            book.run(run)
    summary(book)


if __name__ == "__main__":
    main()
