"""Tables of the rehearsal on embedded images: `python benchmarks/huge/summary.py` writes results/embedded.md."""

from __future__ import annotations

import re
from pathlib import Path

from book import Book, shown
from embedded import (
    AUTO,
    BATCHES,
    EPOCHS,
    SECOND_ORDER,
    SYSTEMS,
    TEXT_BATCH,
    TEXT_EPOCHS,
    TEXTS,
    best_rate,
    lost_without,
)

HERE = Path(__file__).parent / "results"


def searched(book: Book, pattern: str) -> list[str]:
    """Rates and scores of the runs whose names fit, by rising rate."""
    found = {
        float(m[1]): row
        for name, row in book.rows.items()
        if (m := re.fullmatch(f"{pattern} rate (\\S+) seed 0", name))
    }
    return [f"{rate:g}: {shown([found[rate]])}" for rate in sorted(found)]


def tabulated(book: Book, batch: int) -> list[str]:
    """All systems at a batch, the best first: rates that were tried, other seeds at the best of them, steps."""
    lines = {}
    for system in SYSTEMS:
        rates = searched(book, f"search {system} {batch}")
        if rates:
            runs = book.of(f"table {system} {batch} rate {best_rate(book, system, batch, run=False):g}")
            steps = runs[0].get("steps", "") if runs else ""
            mean = sum(row["accuracy"] for row in runs) / len(runs) if runs else 0.0
            lines[f"| {system} | {', '.join(rates)} | {shown(runs)} | {steps} |"] = mean
    heading = f"## Batch {batch:,} (largest stage), {EPOCHS} epochs of 3,000 images, percent of 9,000 held-out images"
    titles = ["| system | rates, seed 0 | the best of them, seeds 1 to 3 | steps |", "|---|---|---|---:|"]
    return ["", heading, "", *titles, *sorted(lines, key=lines.__getitem__, reverse=True)] if lines else []


def second_order(book: Book) -> list[str]:
    """Shampoo and SOAP beside Muon at the huge batch."""
    batch, lines = BATCHES[0], []
    for system in ("leap", *SECOND_ORDER, "muon"):
        rates = searched(book, f"search {system} {batch}")
        runs = book.of(f"second order {system} {batch} rate {best_rate(book, system, batch, run=False):g}")
        if runs:
            lines.append(f"| {system} | {', '.join(rates)} | {shown(runs)} | {runs[0]['steps']} |")
    titles = ["| system | rates, seed 0 | the best of them, other seeds | steps |", "|---|---|---|---:|"]
    return ["", f"## Shampoo and SOAP in the place of Muon, batch {batch:,}", "", *titles, *lines] if lines else []


def lost(book: Book) -> list[str]:
    """Points that systems lose without a technique."""
    lines = [
        f"| {recipe} | {name} | {' | '.join(shown([{'accuracy': each} for each in by_batch[b]]) for b in BATCHES)} |"
        for recipe in ("leap", "sony")
        for name, by_batch in lost_without(book, recipe).items()
        if any(by_batch.values())
    ]
    titles = [f"| system | without | {' | '.join(f'{batch:,}' for batch in BATCHES)} |", "|---|---|---|---|"]
    return ["", "## Points lost without one technique, same seeds", "", *titles, *lines] if lines else []


def main() -> None:
    """Write what was run, and nothing else."""
    book = Book(HERE / "embedded.jsonl")
    commits = sorted({row["commit"] for row in book.rows.values()})
    text = [
        "# Huge batches on the embedded images", "",
        "Written by `python benchmarks/huge/summary.py`. Two cores of an AMD EPYC, shared with other work; one thread "
        f"a run; commit {', '.join(commits)}.",
    ]  # fmt: skip
    for batch in BATCHES:
        text += tabulated(book, batch)
    text += second_order(book) + lost(book)
    if any(book.of(f"auto {name}") for name in AUTO):
        text += ["", "## plan: auto (LARS with the settings of `sony`, 3,000 images, 10 epochs), held-out images", ""]
        text += ["| batches | percent | steps | batches of the first seed |", "|---|---|---:|---|"]
        for name in AUTO:
            runs = book.of(f"auto {name}")
            if runs:
                stages = " → ".join(f"{batch:,} (epoch {epoch:g})" for epoch, batch in runs[0]["batches"])
                steps = ", ".join(f"{row['steps']:,}" for row in runs)
                text.append(f"| {name} | {shown(runs)} | {steps} | {stages} |")
    trials = [(name, row) for name, row in book.rows.items() if name.startswith("rates ")]
    if trials:
        text += ["", "## Settings of `muon` at 1,024, 20 epochs, held-out images", ""]
        text += [f"- {name[11:].rsplit(' seed ', 1)[0]}: {shown([row])}" for name, row in trials]
    rows = {recipe: searched(book, f"text {recipe} {TEXT_BATCH}") for recipe in TEXTS}
    if any(rows.values()):
        text += [
            "",
            f"## gpt-mini, {TEXT_BATCH} sequences a step, {TEXT_EPOCHS:g} epochs, bits a byte of held-out text",
            "",
        ]
        text += [f"- {recipe}: {', '.join(each)}" for recipe, each in rows.items() if each]
    (HERE / "embedded.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
