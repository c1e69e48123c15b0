"""The converged ranking on CIFAR-10 itself where there is no GPU: all images, a small network, ten epochs.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/cifar10/small.py --data FOLDER --processes 2

What `converged.py` asks of resnet9 in thirty epochs, asked of what a CPU core trains in a minute. Batches are those of
the largest stage; 16,384 is three steps an epoch. Parts, which go on where they were:

`search`    each system's rates on 5,000 held-out images, for 16,384 by 14,720 in a step of the other 45,000, then for
            2,048: a grid that grows until its best is inside, one rule and one budget for all
`table`     other seeds on the test images at 16,384, with the rate that `search` chose
`ablation`  the same seeds of `leap` and `sony` without one technique
`auto`      the same two with `plan: auto`, from a sixteenth of the batch on, at the rate of their own plans
`rounds`    a whole seed before the next: the ablation and the table at the other batches. The rate is that of 2,048 by
            the square root below it, and beyond it by the power of the batch that brings it to the rate of 16,384

Every run is a line of results/small.jsonl; `--summary` writes results/small.md from it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lanes import Crew, Lanes, singles
from ours import THREE_STEPS, result_of, widening
from runs import LOCAL, VALIDATION, Book, Planned
from techniques import without  # found by way of `ours`

RESULTS = Path(__file__).parent / "results"
EPOCHS, BATCH, SEEDS = 10, 16384, (1, 2, 3)
SEARCHED = {BATCH: THREE_STEPS, 2048: 2048}
"""Batches whose rates are searched for, each with the batch that stands for it on the images left."""
BATCHES = (512, 2048, 8192, BATCH, 25000)
ABLATED = (BATCH, 8192, 512)
"""Batches at which techniques are left out."""
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


def best_rate(system: str, batch: int) -> Generator[Planned, Mapping[str, Any], float]:
    """Rates of a system, one after the other; returns what the held-out images prefer."""
    trials = widening(MIDDLES[system])
    rate = next(trials)
    while True:
        row = yield planned("search", system, SEARCHED[batch], rate, holdout=VALIDATION)
        try:
            rate = trials.send(row["accuracy"])
        except StopIteration as end:
            return float(end.value)


def search(rows: Rows) -> Lanes:
    """A rate for each system at each of two batches; each is a lane."""
    return (best_rate(system, batch) for batch in SEARCHED for system in MIDDLES)  # type: ignore[misc]  # read from rows


def table(rows: Rows, batches: Sequence[int] = (BATCH,), seeds: Sequence[int] = SEEDS) -> Lanes:
    """Other seeds on the test images; a system whose search is not over is left out."""
    return singles(
        planned("table", system, batch, rate, seed)
        for seed in seeds
        for batch in batches
        for system, rate in chosen(rows, batch).items()
    )


def chosen(rows: Rows, batch: int = BATCH) -> dict[str, float]:
    """The rate at a batch of each system whose search is over."""
    rates = {system: _rate_at(batch, lambda at, of=system: result_of(best_rate(of, at), rows)) for system in MIDDLES}
    return {system: rate for system, rate in rates.items() if rate is not None}


def _rate_at(batch: int, found: Callable[[int], float | None]) -> float | None:
    """The rate by the rule of the batch: a square root up to the smaller one that was searched, beyond it a power."""
    if batch in SEARCHED:
        return found(batch)
    smaller, larger = min(SEARCHED), max(SEARCHED)
    low, high = found(smaller), found(larger)
    if low is None or high is None:
        return None
    power = 0.5 if batch < smaller else math.log(high / low) / math.log(larger / smaller)
    return float(f"{low * (batch / smaller) ** power:.3g}")


def _changed(name: str, system: str, settings: tuple[str, ...], seed: int, batch: int = BATCH) -> Planned:
    at = "" if batch == BATCH else f" {batch}"
    return Planned(f"{name} {system}{at}", system, batch, (*NETWORK, *settings), EPOCHS, seed)


def left_out(rows: Rows, system: str, batch: int = BATCH) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Techniques, and settings that leave each out of a system; another optimizer has the rate of its own search."""
    constant = (f"workers.count={batch // LOCAL}", f"workers.local_batch={LOCAL}")
    rates = chosen(rows, batch)
    return without(system, "cifar10", constant, lambda other: rated(rates[other]) if other in rates else (), EPOCHS)


def ablation(rows: Rows, batches: Sequence[int] = (BATCH,), seeds: Sequence[int] = SEEDS) -> Lanes:
    """What each technique buys."""
    return singles(
        _changed(
            f"ablation without {name}", system, (UNMEASURED, *rated(chosen(rows, batch)[system]), *settings),
            seed, batch,
        )
        for seed in seeds
        for batch in batches
        for system in OURS_AND_BEST
        if system in chosen(rows, batch)
        for name, settings in left_out(rows, system, batch)
    )  # fmt: skip


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


def rounds(rows: Rows) -> Lanes:
    """What the other batches show, a seed at a time."""
    for seed in SEEDS:
        yield from table(rows, ABLATED[1:], (seed,))
        yield from ablation(rows, ABLATED[1:], (seed,))
        yield from table(rows, (2048, 25000), (seed,))


PARTS = {"search": search, "table": table, "ablation": ablation, "auto": auto, "rounds": rounds}


def _percent(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {(max(values) - min(values)) / 2:.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread} (n={len(values)})"


def _of(rows: Rows, name: str) -> dict[int, Mapping[str, Any]]:
    """Runs of a name by seed."""
    return {row["seed"]: row for key, row in rows.items() if key.rsplit(" seed ", 1)[0] == name}


def _whole(rows: Rows, system: str, batch: int) -> dict[int, Mapping[str, Any]]:
    """Runs of a system at the rate of a batch, on test images, by seed."""
    rate = chosen(rows, batch).get(system)
    return {} if rate is None else _of(rows, f"table {system} {batch} rate {rate:g}")


def _accuracy(runs: Mapping[int, Mapping[str, Any]]) -> list[float]:
    return [100 * (row["accuracy"] or 0.0) for row in runs.values()]


def _table(rows: Rows) -> list[str]:
    """Test accuracy by system and batch, best system first."""
    lines = []
    for system in MIDDLES:
        cells = [_whole(rows, system, batch) for batch in BATCHES]
        values = _accuracy(_whole(rows, system, BATCH))
        mean = statistics.mean(values) if values else 0.0
        lines.append((-mean, f"| `{system}` | {' | '.join(_percent(_accuracy(cell)) for cell in cells)} |"))
    steps = (_steps(_whole(rows, "plain", batch).values()) for batch in BATCHES)
    more = (_steps(_whole(rows, "leap", batch).values()) for batch in BATCHES)
    head = f"| system | {' | '.join(f'{batch:,}' for batch in BATCHES)} |"
    return [
        head, "|---|" + "---:|" * len(BATCHES), *(line for _, line in sorted(lines)),
        f"| steps of a constant batch | {' | '.join(steps)} |", f"| steps of `leap` and `sony` | {' | '.join(more)} |",
    ]  # fmt: skip


def _steps(runs: Iterable[Mapping[str, Any]]) -> str:
    return next((str(row["steps"]) for row in runs if "steps" in row), "")


def _searched(rows: Rows) -> list[str]:
    """All rates, with what the held-out images made of them."""
    lines = []
    for batch, stands in SEARCHED.items():
        rates = chosen(rows, batch)
        for system in MIDDLES:
            prefix = f"search {system} {stands} rate "
            tried = {
                float(name.removeprefix(prefix).split()[0]): 100 * (row["accuracy"] or 0.0)
                for name, row in rows.items()
                if name.startswith(prefix)
            }
            if not tried:
                continue
            best = rates.get(system, 0.0)
            bold = {rate: "**" * (rate == best) for rate in tried}
            cells = (f"{bold[rate]}{rate:g}: {tried[rate]:.1f}{bold[rate]}" for rate in sorted(tried))
            is_open = "" if min(tried) < best < max(tried) else "; open"
            lines.append(f"| `{system}` | {batch:,} | {', '.join(cells)}{is_open} |")
    return ["| system | batch | rates |", "|---|---:|---|", *lines]


def _ablation(rows: Rows) -> list[str]:
    """Points of test accuracy lost without a technique, seed by seed."""
    lines = []
    for system in OURS_AND_BEST:
        names = [name for name, _ in left_out(rows, system)] if system in chosen(rows) else []
        for name in names:
            cells = []
            for batch in sorted(ABLATED):
                whole = _whole(rows, system, batch)
                changed = _of(rows, _changed(f"ablation without {name}", system, (), 0, batch).name)
                lost = [
                    100 * ((whole[seed]["accuracy"] or 0.0) - (row["accuracy"] or 0.0))
                    for seed, row in changed.items()
                    if seed in whole
                ]
                cells.append(_percent(lost))
            if any(cells):
                lines.append(f"| `{system}` | {name} | {' | '.join(cells)} |")
    head = f"| system | without | {' | '.join(f'{batch:,}' for batch in sorted(ABLATED))} |"
    return [head, "|---|---|" + "---:|" * len(ABLATED), *lines] if lines else []


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
        "# CIFAR-10, a small network, ten epochs", "",
        "Written by `python benchmarks/cifar10/small.py --summary` from small.jsonl. Test accuracy in percent, mean ±",
        "half the range of seeds that no rate was chosen with, by images in the largest step. Behind a rate is its",
        "held-out accuracy, the best in bold.", "",
        "; ".join(f"{key} {', '.join(values)}" for key, values in about.items()),
    ]  # fmt: skip
    for title, lines in (
        ("Every system at its best rate", _table(rows)),
        ("Points lost without one technique", _ablation(rows)),
        ("plan: auto, from 1,024 on", _auto(rows)),
        ("Rates", _searched(rows)),
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
