"""Tables of the fast preset, the finished search, its table, the ablation and plan: auto, from the book of runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from converged import BATCHES, MIDDLES, SEARCHED, base_rate, found, is_inside, name_of, rule_of, stays
from ours import TRIALS, result_of, search_of

Row = dict[str, Any]


def tables(rows: Sequence[Row]) -> list[str]:
    """All that was run of it, as Markdown; empty where nothing was."""
    book = {row["name"]: row for row in rows}
    text: list[str] = []
    for title, lines in (
        ("94 % in seconds: `muon --preset sprint`, batch 2,048, test images", _timed(book)),
        ("`leap`, `muon` and `sprint` tuned on held-out images, one seed", _tuned(book)),
        ("The search finished: percent of held-out images by rate; open where the best is at an end", _search(book)),
        ("Test accuracy with the rates of the finished search", _converged(book)),
        ("Without one technique: points of test accuracy lost", _ablation(book)),
        ("plan: auto", _auto(book)),
    ):
        if lines:
            text += ["", f"## {title}", "", *lines]
    return text


def _timed(book: dict[str, Row]) -> list[str]:
    """Twenty seeds: accuracy of one view and of six, and seconds."""
    runs = [row for name, row in book.items() if name.startswith("timed sprint ") and row.get("accuracy")]
    if not runs:
        return []
    name = runs[0]["name"].removeprefix("timed sprint ").rsplit(" seed ", 1)[0]
    lines = [f"{name}; settings {' '.join(runs[0]['settings'])}; commit {runs[0]['commit']}", ""]
    for key, title in (("accuracy", "one view"), ("accuracy_views", "six views")):
        values = [100 * row[key] for row in runs if row.get(key) is not None]
        reached = sum(value >= 94 for value in values)
        lines.append(
            f"- {title}: mean {statistics.mean(values):.2f} %, {min(values):.2f} to {max(values):.2f}, {reached} of "
            f"{len(values)} at 94 % or more"
        )
    seconds = [row["seconds"] for row in runs]
    spread = f"{min(seconds):.2f} to {max(seconds):.2f} (n={len(seconds)})"
    return [*lines, f"- seconds of training and evaluation: median {statistics.median(seconds):.2f}, {spread}"]


def _tuned(book: dict[str, Row]) -> list[str]:
    lines = []
    for system in (*TRIALS, "sprint"):
        prefix = search_of(system).send(None).name.rsplit(" rate ", 1)[0]
        runs = {name: row for name, row in book.items() if name.startswith(f"{prefix} ")}
        if runs:
            tried = ", ".join(
                f"{name.removeprefix(prefix).rsplit(' seed ', 1)[0].strip()}: {100 * (row['accuracy'] or 0):.2f}"
                for name, row in runs.items()
            )
            kept = result_of(search_of(system), book)
            lines.append(f"| {system} | {tried} | {'not over' if kept is None else ' '.join(kept)} |")
    return ["| system | tried | kept |", "|---|---|---|", *lines] if lines else []


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
                told = "" if is_inside(rates) else "open"
                lines.append(f"| {recipe} | {SEARCHED[batch]:,} | {', '.join(cells)} | {told} |")
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
    for recipe in (*TRIALS, *MIDDLES):
        rule = rule_of(book, recipe) if recipe in MIDDLES else ()
        if rule is None:  # its search is not over
            continue
        cells = [_cell(_of(book, name_of(book, recipe, batch))) for batch in batches]
        if any(cells):
            rates = [base_rate(recipe, batch, rule) for batch in batches]
            told = [f"{cell}, rate {rate:.3g}" if cell else "" for cell, rate in zip(cells, rates, strict=True)]
            changed = "as it was" if all(stays(book, recipe, batch) for batch in batches) else " ".join(rule)
            lines.append(f"| {recipe} | {' | '.join(told)} | {'' if recipe in TRIALS else changed} |")
    named = " | ".join(f"{batch:,}" for batch in batches)
    heading = [f"| system | {named} | rule of the preset |", "|---" * (len(batches) + 2) + "|"]
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
                and (whole := f"{name_of(book, recipe, batch)} seed {row['seed']}") in book
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
        whole = name_of(book, recipe, int(batch))
        fixed = [row for key, row in book.items() if key.rsplit(" seed ", 1)[0] == whole]
        steps = [_steps(each) for each in (runs, fixed)]
        plan = " → ".join(f"{s['count'] * s['local_batch']:,} at {s['epoch']:g}" for s in runs[0].get("plan", []))
        lines.append(
            f"| {recipe} | {int(batch):,} | {_cell(_of(book, name))} | {steps[0]} | "
            f"{_cell(_of(book, whole))} | {steps[1]} | {plan} |"
        )
    heading = [
        "| system | largest | auto | steps | fixed plan | steps | stages of the first seed |",
        "|---|---:|---|---:|---|---:|---|",
    ]
    return [*heading, *lines] if lines else []


def _steps(runs: Sequence[Row]) -> str:
    return f"{statistics.median(row.get('steps') or 0 for row in runs):,.0f}" if runs else ""
