"""Tables from the book of runs: `python benchmarks/cifar10/summary.py` writes results/summary.md.

Only what was run stands in them; a cell without a run is empty, and the number of seeds stands beside each figure.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from runs import BATCHES

from bigstep.recipes import SYNCHRONOUS

HERE = Path(__file__).parent / "results"


def named(rows: list[dict[str, Any]], *words: str) -> list[dict[str, Any]]:
    """Runs whose name begins with these words."""
    prefix = " ".join(words) + " "
    return [row for row in rows if (row["name"] + " ").startswith(prefix)]


def percent(rows: list[dict[str, Any]]) -> str:
    """Mean, spread and number of seeds; a run that failed counts as what it reached: nothing."""
    if not rows:
        return ""
    values = [100 * (row["accuracy"] or 0.0) for row in rows]
    spread = f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread} (n={len(values)})"


def search_table(rows: list[dict[str, Any]]) -> list[str]:
    """Held-out accuracy by system, batch and rate; the best of each batch in bold."""
    batches = (2048, 16384)
    lines = ["| system | batch | lowest rate | middle | highest | steps | s |", "|---|---:|---|---|---|---:|---:|"]
    for recipe in SYNCHRONOUS:
        for batch in batches:
            found = named(rows, "search", recipe, str(batch), "rate")
            found.sort(key=lambda row: float(row["name"].split(" rate ")[1].split()[0]))
            best = max((row["accuracy"] or 0 for row in found), default=0)
            cells = []
            for row in found:
                text = f"{row['name'].split(' rate ')[1].split()[0]}: {100 * (row['accuracy'] or 0):.2f}"
                cells.append(f"**{text}**" if row["accuracy"] == best else text)
            if found:
                seconds = statistics.median(row["seconds"] for row in found)
                lines.append(f"| {recipe} | {batch:,} | {' | '.join(cells)} | {found[0]['steps']:,} | {seconds:.1f} |")
    return lines


def accuracy_table(rows: list[dict[str, Any]]) -> list[str]:
    """The table of systems and batches on the test set."""
    lines = ["| system | " + " | ".join(f"{batch:,}" for batch in BATCHES) + " |", "|---" * (len(BATCHES) + 1) + "|"]
    for recipe in SYNCHRONOUS:
        cells = [percent(named(rows, "table", recipe, str(batch))) for batch in BATCHES]
        if any(cells):
            lines.append(f"| {recipe} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Write the summary."""
    rows = [json.loads(line) for line in (HERE / "runs.jsonl").read_text().splitlines()]
    text = [
        "# CIFAR-10 on one H200", "",
        "Written by `python benchmarks/cifar10/summary.py` from runs.jsonl. Seconds hold training and evaluations; the "
        "first run of a process also holds compilation and the choice of convolution algorithms.", "",
        "## Search", "",
        "30 epochs, 45,000 images to train on and 5,000 held out to judge, one seed, resnet9, workers of 32 images; "
        "accuracy in percent behind each rate.", "",
        *search_table(rows),
    ]  # fmt: skip
    if named(rows, "table"):
        text += ["", "## Test accuracy by system and batch", "", *accuracy_table(rows)]
    for part, title in (("norms", "Batch norm by worker and over the whole batch"), ("curves", "Fused and plain")):
        kinds = sorted({row["name"].rsplit(" seed ", 1)[0] for row in named(rows, part)})
        if kinds:
            text += ["", f"## {title}", ""]
            text += [f"- {kind}: {percent(named(rows, kind, 'seed'))}" for kind in kinds]
    (HERE / "summary.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
