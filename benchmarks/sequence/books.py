"""Rules, batches and islands on a text of books, on one GPU, in equal tokens.

    PYTHONPATH=src python benchmarks/sequence/books.py rates batches islands --data books.txt --book results/runs.jsonl

`rates` looks for the rate of each rule at two batches, `batches` is the table of rules by batch, `islands` that of
islands by steps between meetings. A run is a preset `books` with settings; what it gave is one line of JSON in the
book, and a line that is there is not run again, so a series that is cut short goes on. `summary` prints the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bigstep import recipes
from bigstep.bench.suites import LARS_ON_TEXT, SGD_ON_TEXT
from bigstep.config import RunConfig
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.engine.build import Own, build
from bigstep.engine.loop import train
from bigstep.engine.observers.base import Audience
from bigstep.engine.observers.noise import NoiseWatch
from bigstep.engine.ranks import Ranks
from bigstep.errors import BigstepError

LOCAL = 8
RULES = {
    "sgd": ("adamw", SGD_ON_TEXT, 0.1),
    "lars": ("adamw", LARS_ON_TEXT, 0.5),
    "adamw": ("adamw", (), 1e-3),
    "lamb": ("lamb", (), 4e-3),
}
"""A rule: its preset, what is changed in it, and a rate at a batch of 64."""
BATCHES = (64, 512, 2048, 8192)


class Run(NamedTuple):
    """A line of the book to come."""

    name: str
    preset: str
    settings: tuple[str, ...]
    epochs: float
    seed: int = 0


def sizes(batch: int) -> tuple[str, ...]:
    return f"workers.count={batch // LOCAL}", f"workers.local_batch={LOCAL}"


def rates(epochs: float, best: dict[str, Any]) -> Iterator[Run]:
    """A third of the tokens, three rates a factor of two or more apart, at a small and a large batch."""
    for batch in (512, 8192):
        for rule, (preset, changes, rate) in RULES.items():
            scaled = rate * math.sqrt(min(batch, 4096) / 64)
            for factor in (0.25, 1.0, 4.0) if rule in ("sgd", "lars") else (0.5, 1.0, 2.0):
                fixed = (f"lr.base={factor * scaled:.4g}", "lr.scaling=none")
                yield Run(f"rate {rule} {batch} x{factor:g}", preset, (*changes, *sizes(batch), *fixed), epochs / 3)


def batches(epochs: float, best: dict[str, Any], seeds: int = 1) -> Iterator[Run]:
    """Each rule at each batch with the rate that was best nearby, by the square root of the batch in between."""
    for seed in range(seeds):
        for batch in BATCHES:
            for rule, (preset, changes, rate) in RULES.items():
                near = 512 if batch <= 2048 else 8192
                factor = best.get(f"{rule} {near}", 1.0)
                value = factor * rate * math.sqrt(min(batch, 4096) / 64)
                fixed = (f"lr.base={value:.4g}", "lr.scaling=none")
                yield Run(f"batch {rule} {batch}", preset, (*changes, *sizes(batch), *fixed), epochs, seed)


def islands(epochs: float, best: dict[str, Any], seeds: int = 1) -> Iterator[Run]:
    """DiLoCo with AdamW inside, M islands that meet every H steps: what matters most first."""
    base = (*sizes(512), f"lr.base={best.get('adamw 512', 1.0) * 1e-3:.4g}", "lr.scaling=none")

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

    def __init__(self, path: Path, data: str, device: torch.device, small: bool) -> None:
        self.path, self.device, self.small = path, device, small
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = {(row["name"], row["seed"]): row for row in map(json.loads, lines)}
        self.pair: Any = None
        self.data = data

    def best(self) -> dict[str, float]:
        """The factor of the rate that was best, by rule and batch."""
        found: dict[str, tuple[float, float]] = {}
        for (name, _), row in self.rows.items():
            if name.startswith("rate "):
                _, rule, batch, factor = name.split()
                score = row.get("bits_per_byte") or math.inf
                found.setdefault(f"{rule} {batch}", (math.inf, 1.0))
                found[f"{rule} {batch}"] = min(found[f"{rule} {batch}"], (score, float(factor[1:])))
        return {key: factor for key, (_, factor) in found.items()}

    def config(self, run: Run) -> RunConfig:
        quiet = ["checkpoint.every=0", "checkpoint.seconds=0", "evaluate_every=1000", f"seed={run.seed}"]
        preset = recipes.load(run.preset, "mini" if self.small else "books")
        config = stretch(apply_settings(preset, [*quiet, "data.drop_last=true"]), run.epochs)
        return apply_settings(config, run.settings)

    def run(self, run: Run) -> None:
        if (run.name, run.seed) in self.rows:
            return
        config = self.config(run)
        if self.pair is None:
            where = config.data
            name, path = ("shakespeare", "") if self.small else ("text", self.data)
            self.pair = open_data(name, path, length=where.length, vocabulary=where.vocabulary)
        row: dict[str, Any] = {"name": run.name, "seed": run.seed, "epochs": run.epochs, "settings": run.settings}
        started = time.perf_counter()
        try:
            built = build(config, Ranks(device=self.device), Own(data=(self.pair.train, self.pair.test)))
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
        self.rows[(run.name, run.seed)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        bits, steps = row.get("bits_per_byte"), row.get("steps")
        print(
            f"{run.name:44} {bits} bits/byte  {steps} steps  {row['seconds']:.1f} s  {row.get('error', '')}", flush=True
        )


def summary(book: Book) -> None:
    """Print the tables."""
    for title in ("rate", "batch", "islands"):
        rows = sorted((key, row) for key, row in book.rows.items() if key[0].startswith(title))
        if rows:
            print(f"\n| {title} | seed | bits per byte | steps | noise scale | seconds |\n|---|---|---|---|---|---|")
        for (name, seed), row in rows:
            bits, noise = row.get("bits_per_byte"), row.get("noise_scale")
            shown = row.get("error", "not finite") if bits is None else f"{bits:.3f}"
            scale = f"{noise:,.0f}" if noise else ""
            print(f"| {name} | {seed} | {shown} | {row.get('steps')} | {scale} | {row['seconds']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("series", nargs="+", choices=["rates", "batches", "islands", "summary"])
    parser.add_argument("--data", default="books.txt")
    parser.add_argument("--book", type=Path, default=Path("results/runs.jsonl"))
    parser.add_argument("--epochs", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after this")
    parser.add_argument("--check", action="store_true", help="small, on a CPU")
    options = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cpu" if options.check else "cuda")
    book = Book(options.book, options.data, device, options.check)
    for series in options.series:
        if series == "summary":
            summary(book)
            continue
        planned = {"rates": rates, "batches": batches, "islands": islands}[series]
        extra = {} if series == "rates" else {"seeds": options.seeds}
        for run in planned(options.epochs, book.best(), **extra):  # type: ignore[operator]
            if time.perf_counter() - begin < options.seconds:
                book.run(run)


if __name__ == "__main__":
    main()
