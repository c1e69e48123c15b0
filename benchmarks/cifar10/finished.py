"""Tables of the finished search, its table, the ablation and plan: auto, from the book of runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from converged import BATCHES, MIDDLES, SEARCHED, found, is_inside, rate_of

Row = dict[str, Any]


def tables(rows: Sequence[Row]) -> list[str]:
    """All that was run of it, as Markdown; empty where nothing was."""
    book = {row["name"]: row for row in rows}
    text: list[str] = []
    for title, lines in (
        ("The search finished: percent of held-out images by rate; open where the best is at an end", _search(book)),
        ("Test accuracy with the rates of the finished search", _converged(book)),
        ("Without one technique: points of test accuracy lost", _ablation(book)),
        ("plan: auto", _auto(book)),
    ):
        if lines:
            text += ["", f"## {title}", "", *lines]
    return text


def _search(book: dict[str, Row]) -> list[str]:
    lines = []
    for recipe in MIDDLES:
        for batch in SEARCHED:
            rates = found(book, recipe, batch)
            if rates:
                best = max(rates, key=rates.__getitem__)
                cells = [
                    f"{'**' if rate == best else ''}{rate:g}: {100 * rates[rate]:.2f}{'**' if rate == best else ''}"
                    for rate in sorted(rates)
                ]
                lines.append(f"| {recipe} | {batch:,} | {', '.join(cells)} | {'' if is_inside(rates) else 'open'} |")
    return ["| system | batch | rates | |", "|---|---:|---|---|", *lines] if lines else []


def _of(book: dict[str, Row], name: str) -> list[float]:
    return [100 * (row["accuracy"] or 0.0) for key, row in book.items() if key.rsplit(" seed ", 1)[0] == name]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread} (n={len(values)})"


def _converged(book: dict[str, Row]) -> list[str]:
    batches, lines = sorted(BATCHES), []
    for recipe in MIDDLES:
        cells = [_cell(_of(book, f"converged {recipe} {batch}")) for batch in batches]
        if any(cells):
            rates = [rate_of(book, recipe, batch) for batch in batches]
            told = [
                f"{cell}, rate {rate:.3g}" if cell and rate else cell for cell, rate in zip(cells, rates, strict=True)
            ]
            lines.append(f"| {recipe} | {' | '.join(told)} |")
    heading = ["| system | " + " | ".join(f"{batch:,}" for batch in batches) + " |", "|---" * (len(batches) + 1) + "|"]
    return [*heading, *lines] if lines else []


def _ablation(book: dict[str, Row]) -> list[str]:
    """Each against the whole system of the same batch, over the seeds that both have."""
    batches = (512, 8192, 16384)
    kinds = dict.fromkeys(
        (name.split()[1], name.split(" without ")[1].rsplit(" seed ", 1)[0])
        for name in book
        if name.startswith("ablation ")
    )
    lines = []
    for recipe, technique in kinds:
        cells = []
        for batch in batches:
            losses = [
                100 * ((book[whole]["accuracy"] or 0.0) - (row["accuracy"] or 0.0))
                for name, row in book.items()
                if name.startswith(f"ablation {recipe} {batch} without {technique} seed ")
                and (whole := f"converged {recipe} {batch} seed {row['seed']}") in book
            ]
            cells.append(_cell(losses))
        lines.append(f"| {recipe} | {technique} | {' | '.join(cells)} |")
    heading = ["| system | without | " + " | ".join(f"{batch:,}" for batch in batches) + " |", "|---|---|---|---|---|"]
    return [*heading, *lines] if lines else []


def _auto(book: dict[str, Row]) -> list[str]:
    lines = []
    for name in dict.fromkeys(key.rsplit(" seed ", 1)[0] for key in book if key.startswith("auto ")):
        recipe, batch = name.split()[1:3]
        runs = [row for key, row in book.items() if key.rsplit(" seed ", 1)[0] == name]
        fixed = [row for key, row in book.items() if key.rsplit(" seed ", 1)[0] == f"converged {recipe} {batch}"]
        steps = [_steps(each) for each in (runs, fixed)]
        plan = " → ".join(f"{s['count'] * s['local_batch']:,} at {s['epoch']:g}" for s in runs[0].get("plan", []))
        lines.append(
            f"| {recipe} | {int(batch):,} | {_cell(_of(book, name))} | {steps[0]} | "
            f"{_cell(_of(book, f'converged {recipe} {batch}'))} | {steps[1]} | {plan} |"
        )
    heading = [
        "| system | largest | auto | steps | fixed plan | steps | stages of the first seed |",
        "|---|---:|---|---:|---|---:|---|",
    ]
    return [*heading, *lines] if lines else []


def _steps(runs: Sequence[Row]) -> str:
    return f"{statistics.median(row.get('steps') or 0 for row in runs):,.0f}" if runs else ""
