"""The converged ranking on CIFAR-10 itself where there is no GPU: all images, a small network, ten epochs.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/cifar10/small.py --data FOLDER --processes 2

What `converged.py` asks of resnet9 in thirty epochs, asked of what a CPU core trains in a minute: batches of 16,384 in
the largest stage, three steps an epoch. Parts, which go on where they were:

`search`    each system's rates on 5,000 held-out images, 14,720 in a step of the other 45,000: a grid that grows until
            its best is inside, one rule and one budget for all
`table`     other seeds with the rate that `search` chose, on the test images, a whole seed before the next
`ablation`  the same seeds of `leap` and `sony` without one technique
`auto`      the same two with `plan: auto`, from a sixteenth of the batch on, at the rate of their own plans

Every run is a line of results/small.jsonl; `--summary` writes results/small.md from it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lanes import Crew, Lanes, singles
from ours import THREE_STEPS, result_of, widening
from runs import LOCAL, VALIDATION, Book, Planned
from techniques import without  # found by way of `ours`

RESULTS = Path(__file__).parent / "results"
EPOCHS, BATCH, SEEDS = 10, 16384, (1, 2, 3)
NETWORK = ("model=small", "precision=float32")
UNMEASURED = "measure_noise=false"
MIDDLES = {
    "leap": 0.24, "muon": 0.24, "sony": 3.0, "plain": 0.8, "fujitsu": 3.0, "google": 0.8, "fastai": 0.4, "lars": 3.0,
    "pfn": 0.8, "fair": 0.8, "onebit": 0.06,
}  # fmt: skip
"""The middle of each system's rates; `tencent` is `lars` on one rank, and `onebit` quantises nothing there."""
OURS_AND_BEST = ("leap", "sony")
"""Whose techniques are left out in turn: our own, and the published system that loses least with resnet9."""

Rows = Mapping[str, Mapping[str, Any]]


def rated(rate: float) -> tuple[str, ...]:
    """Settings of a rate that no rule changes."""
    return "lr.scaling=none", f"lr.base={rate:g}"


def planned(name: str, system: str, batch: int, rate: float, seed: int = 0, holdout: float = 0.0) -> Planned:
    """One run of a system as it is, at a rate."""
    settings = (*NETWORK, UNMEASURED, *rated(rate))
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
    return singles(
        planned("table", system, BATCH, rate, seed) for seed in SEEDS for system, rate in chosen(rows).items()
    )


def chosen(rows: Rows) -> dict[str, float]:
    """The rate of each system whose search is over."""
    rates = {system: result_of(best_rate(system), rows) for system in MIDDLES}
    return {system: rate for system, rate in rates.items() if rate is not None}


def _changed(name: str, system: str, settings: tuple[str, ...], seed: int) -> Planned:
    return Planned(f"{name} {system}", system, BATCH, (*NETWORK, *settings), EPOCHS, seed)


def left_out(rows: Rows, system: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Techniques, and settings that leave each out of a system; another optimizer has the rate of its own search."""
    constant = (f"workers.count={BATCH // LOCAL}", f"workers.local_batch={LOCAL}")
    rates = chosen(rows)
    return without(system, "cifar10", constant, lambda other: rated(rates[other]) if other in rates else (), EPOCHS)


def ablation(rows: Rows) -> Lanes:
    """What each technique buys."""
    return singles(
        _changed(f"ablation without {name}", system, (UNMEASURED, *rated(chosen(rows)[system]), *settings), seed)
        for seed in SEEDS
        for system in OURS_AND_BEST
        for name, settings in left_out(rows, system)
    )


def auto(rows: Rows) -> Lanes:
    """The batch that follows the noise scale; plans that were decided beforehand are in the table."""
    first = (f"workers.count={BATCH // LOCAL // 16}", f"workers.local_batch={LOCAL}")
    growing = ("plan=auto", "growth.most=16", "growth.every=1", "growth.measured=2")
    return singles(
        _changed(f"auto {scales} scales", system, (*first, *growing, f"growth.scales={scales}", *rated(rate)), seed)
        for seed in SEEDS
        for system, rate in chosen(rows).items()
        if system in OURS_AND_BEST
        for scales in (1, 4)
    )


PARTS = {"search": search, "table": table, "ablation": ablation, "auto": auto}


def _percent(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {(max(values) - min(values)) / 2:.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread} (n={len(values)})"


def _of(rows: Rows, name: str) -> dict[int, Mapping[str, Any]]:
    """Runs of a name by seed."""
    return {row["seed"]: row for key, row in rows.items() if key.rsplit(" seed ", 1)[0] == name}


def _table(rows: Rows) -> list[str]:
    """Test accuracy and all rates, best system first."""
    rates, lines = chosen(rows), []
    for system in MIDDLES:
        prefix = f"search {system} {THREE_STEPS} rate "
        tried = {
            float(name.removeprefix(prefix).split()[0]): 100 * (row["accuracy"] or 0.0)
            for name, row in rows.items()
            if name.startswith(prefix)
        }
        if not tried:
            continue
        best = rates.get(system, 0.0)
        cells = (f"{'**' * (rate == best)}{rate:g}: {tried[rate]:.1f}{'**' * (rate == best)}" for rate in sorted(tried))
        shown = _of(rows, f"table {system} {BATCH} rate {best:g}").values()
        values = [100 * (row["accuracy"] or 0.0) for row in shown]
        steps = next((row["steps"] for row in shown if "steps" in row), "")
        is_open = "" if min(tried) < best < max(tried) else "; open"
        mean = statistics.mean(values) if values else 0.0
        lines.append((-mean, f"| `{system}` | {_percent(values)} | {steps} | {', '.join(cells)}{is_open} |"))
    return ["| system | 16,384 | steps | rates |", "|---|---:|---:|---|", *(line for _, line in sorted(lines))]


def _ablation(rows: Rows) -> list[str]:
    """Points of test accuracy lost without a technique, seed by seed."""
    lines = []
    for system in OURS_AND_BEST:
        if system not in chosen(rows):
            continue
        whole = _of(rows, f"table {system} {BATCH} rate {chosen(rows)[system]:g}")
        for name, _ in left_out(rows, system):
            without_it = _of(rows, f"ablation without {name} {system}")
            lost = [
                100 * ((whole[seed]["accuracy"] or 0.0) - (row["accuracy"] or 0.0))
                for seed, row in without_it.items()
                if seed in whole
            ]
            steps = next((row["steps"] for row in without_it.values() if "steps" in row), "")
            if lost:
                lines.append(f"| `{system}` | {name} | {_percent(lost)} | {steps} |")
    return ["| system | without | points lost | steps |", "|---|---|---:|---:|", *lines] if lines else []


def _auto(rows: Rows) -> list[str]:
    """Accuracy and steps of `plan: auto`."""
    lines = []
    for system in OURS_AND_BEST:
        for scales in (1, 4):
            runs = _of(rows, f"auto {scales} scales {system}").values()
            if runs:
                steps = ", ".join(str(row.get("steps", "failed")) for row in runs)
                values = [100 * (row["accuracy"] or 0.0) for row in runs]
                lines.append(f"| `{system}` | {scales} | {_percent(values)} | {steps} |")
    return ["| system | noise scales | accuracy | steps |", "|---|---:|---:|---:|", *lines] if lines else []


def summary(rows: Rows) -> str:
    """All that is there, as Markdown."""
    about = {key: sorted({str(row[key]) for row in rows.values()}) for key in ("commit", "torch", "device")}
    text = [
        "# CIFAR-10, a small network, ten epochs, 16,384 images in the largest step", "",
        "Written by `python benchmarks/cifar10/small.py --summary` from small.jsonl. Test accuracy in percent, mean ±",
        "half the range of seeds that no rate was chosen with; rates with their held-out accuracy, best in bold.", "",
        "; ".join(f"{key} {', '.join(values)}" for key, values in about.items()),
    ]  # fmt: skip
    for title, lines in (
        ("Every system at its best rate", _table(rows)),
        ("Without one technique", _ablation(rows)),
        ("plan: auto, from 1,024 on", _auto(rows)),
    ):
        if lines:
            text += ["", f"## {title}", "", *lines]
    return "\n".join([*text, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--data", help="the folder of CIFAR-10's batches")
    parser.add_argument("--book", type=Path, default=RESULTS / "small.jsonl")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, a thread each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run that would end after this")
    parser.add_argument("--summary", action="store_true", help="write the table of what is there, and train nothing")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; choose from {', '.join(PARTS)}")
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
