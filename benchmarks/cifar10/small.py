"""The converged ranking on CIFAR-10 itself where there is no GPU: all images, a small network, ten epochs.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/cifar10/small.py search table --data FOLDER --processes 2

What `converged.py` asks of resnet9 in thirty epochs, asked of what a CPU core trains in a minute and a half: batches of
16,384 in the largest stage, three steps an epoch. Parts, which go on where they were:

`search`  each system's rates on 5,000 held-out images, 14,720 in a step of the other 45,000: a grid that grows until its
          best is inside, one rule and one budget for all
`table`   other seeds with the rate that `search` chose, on the test images, a whole seed before the next

Every run is a line of results/small.jsonl; `--summary` writes results/small.md from it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from lanes import Crew, Lanes, singles
from ours import THREE_STEPS, result_of, widening
from runs import VALIDATION, Book, Planned

RESULTS = Path(__file__).parent / "results"
EPOCHS, BATCH, SEEDS = 10, 16384, (1, 2, 3)
NETWORK = ("model=small", "precision=float32", "measure_noise=false")
MIDDLES = {
    "leap": 0.24, "muon": 0.24, "sony": 3.0, "plain": 0.8, "fujitsu": 3.0, "google": 0.8, "fastai": 0.4, "lars": 3.0,
    "pfn": 0.8, "fair": 0.8, "onebit": 0.06,
}  # fmt: skip
"""The middle of each system's rates; `tencent` is `lars` on one rank, and `onebit` quantises nothing there."""

Rows = Mapping[str, Mapping[str, Any]]


def planned(name: str, system: str, batch: int, rate: float, seed: int = 0, holdout: float = 0.0) -> Planned:
    """One run at a rate that no rule changes."""
    settings = (*NETWORK, "lr.scaling=none", f"lr.base={rate:g}")
    return Planned(f"{name} {system} {batch} rate {rate:g}", system, batch, settings, EPOCHS, seed, holdout)


def best_rate(system: str) -> Generator[Planned, Mapping[str, Any], float]:
    """Rates of a system, one after the other; returns what the held-out images prefer."""
    trials = widening(MIDDLES[system])
    rate = next(trials)
    while True:
        row = yield planned("search", system, THREE_STEPS, rate, holdout=VALIDATION)
        try:
            rate = trials.send(row["accuracy"])
        except StopIteration as end:
            return float(end.value)


def search(rows: Rows) -> Lanes:
    """A rate for each system; each is a lane."""
    return (best_rate(system) for system in MIDDLES)  # type: ignore[misc]  # what a search returns is read from rows


def table(rows: Rows) -> Lanes:
    """Other seeds on the test images; a system whose search is not over is left out."""
    rates = {system: result_of(best_rate(system), rows) for system in MIDDLES}
    return singles(
        planned("table", system, BATCH, rate, seed)
        for seed in SEEDS
        for system, rate in rates.items()
        if rate is not None
    )


PARTS = {"search": search, "table": table}


def summary(rows: Rows) -> str:
    """Test accuracy and all rates, as Markdown, best system first."""
    lines = []
    for system in MIDDLES:
        tried = [row for name, row in rows.items() if name.startswith(f"search {system} ")]
        if not tried:
            continue
        chosen = result_of(best_rate(system), rows)
        rates = {float(row["name"].split()[4]): row["accuracy"] or 0.0 for row in tried}
        cells = ", ".join(
            f"{'**' * (rate == chosen)}{rate:g}: {100 * rates[rate]:.1f}{'**' * (rate == chosen)}"
            for rate in sorted(rates)
        )
        shown = [row for name, row in rows.items() if name.startswith(f"table {system} {BATCH} rate {chosen or 0:g} ")]
        values = [100 * (row["accuracy"] or 0.0) for row in shown]
        mean = statistics.mean(values) if values else 0.0
        told = f"{mean:.1f} ± {(max(values) - min(values)) / 2:.1f} (n={len(values)})" if values else ""
        steps = next((f"{row['steps']}" for row in shown if "steps" in row), "")
        is_open = chosen is None or chosen in (min(rates), max(rates))
        lines.append((mean, f"| `{system}` | {told} | {steps} | {cells}{'; open' if is_open else ''} |"))
    about = {key: sorted({str(row[key]) for row in rows.values()}) for key in ("commit", "torch", "device")}
    return "\n".join(
        (
            "# CIFAR-10, a small network, ten epochs, 16,384 images in the largest step", "",
            "Written by `python benchmarks/cifar10/small.py --summary` from small.jsonl. Test accuracy in percent, mean ± "
            "half the range of seeds that no rate was chosen with; then held-out accuracy by rate, the best in bold.", "",
            "; ".join(f"{key} {', '.join(values)}" for key, values in about.items()), "",
            "| system | 16,384 | steps | rates |", "|---|---:|---:|---|",
            *(line for _, line in sorted(lines, key=lambda each: -each[0])), "",
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="both by default", metavar="PART")
    parser.add_argument("--data", help="the folder of CIFAR-10's batches")
    parser.add_argument("--book", type=Path, default=RESULTS / "small.jsonl")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, a thread each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run that would end after this")
    parser.add_argument("--summary", action="store_true", help="write the table of what is there, and train nothing")
    options = parser.parse_args()
    book = Book(options.book)
    if options.summary:
        options.book.with_suffix(".md").write_text(summary(book.rows))
        return
    if options.data is None:
        parser.error("--data is missing: the folder of CIFAR-10's batches")
    crew = Crew(book, options.data, options.processes, time.monotonic() + options.seconds, tiny=False)
    for part in options.parts or PARTS:
        if not crew.carry_out(PARTS[part](book.rows)):
            print(f"Stopped in {part}: the time is up; the same command goes on from here.")
            break
    print(crew.close())


if __name__ == "__main__":
    main()
