"""Tables and the figure from the book of runs: `python benchmarks/cifar10/summary.py` writes results/summary.md.

Only what was run stands in them; a cell without a run is empty, and the number of seeds stands beside each figure.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from figure import draw
from finished import tables
from runs import BATCHES

from bigstep.plan.accuracy import fit_law
from bigstep.recipes import SYNCHRONOUS

HERE = Path(__file__).parent / "results"
HEADING = ("| system | " + " | ".join(f"{batch:,}" for batch in BATCHES) + " |", "|---" * (len(BATCHES) + 1) + "|")


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
    """Held-out accuracy by rate, the best in bold; a preset that was changed has other steps, and a line of its own."""
    batches = (2048, 16384)
    lines = ["| system | batch | rates | steps | s |", "|---|---:|---|---:|---:|"]
    for recipe in SYNCHRONOUS:
        for batch in batches:
            tried = named(rows, "search", recipe, str(batch), "rate")
            tried.sort(key=lambda row: float(row["name"].split(" rate ")[1].split()[0]))
            for steps in dict.fromkeys(row["steps"] for row in tried if "steps" in row):
                found = [row for row in tried if row.get("steps", steps) == steps]  # one that failed has none
                best = max(row["accuracy"] or 0 for row in found)
                cells = []
                for row in found:
                    text = f"{row['name'].split(' rate ')[1].split()[0]}: {100 * (row['accuracy'] or 0):.2f}"
                    cells.append(f"**{text}**" if row["accuracy"] == best else text)
                seconds = statistics.median(row["seconds"] for row in found if "seconds" in row)
                lines.append(f"| {recipe} | {batch:,} | {', '.join(cells)} | {steps:,} | {seconds:.1f} |")
    return lines


def accuracy_table(rows: list[dict[str, Any]]) -> list[str]:
    """The table of systems and batches on the test set."""
    lines = list(HEADING)
    for recipe in SYNCHRONOUS:
        same = "lars" if recipe == "tencent" else recipe  # one rank exchanges nothing, and that is where they differ
        cells = [percent(named(rows, "table", same, str(batch))) for batch in BATCHES]
        if any(cells):
            lines.append(f"| {recipe} | " + " | ".join(cells) + " |")
    return lines


def cost_table(rows: list[dict[str, Any]]) -> list[str]:
    """Steps and seconds of the table's runs."""
    lines = list(HEADING)
    for recipe in SYNCHRONOUS:
        if recipe != "tencent":
            cells = [cost(rows, recipe, batch) for batch in BATCHES]
            lines.append(f"| {recipe} | " + " | ".join(cells) + " |")
    return lines


def cost(rows: list[dict[str, Any]], recipe: str, batch: int) -> str:
    """Steps and the least seconds of runs that had the GPU to themselves; of a single run only a bound."""
    found = [row for row in named(rows, "table", recipe, str(batch)) if "steps" in row]  # the others failed
    if not found:
        return ""
    earlier = named(rows, "earlier", "table", recipe, str(batch))  # other settings, the same steps
    same = [row for row in (*found, *earlier) if row.get("steps") == found[0]["steps"]]
    alone = [row["seconds"] for row in same if not row.get("shared")]
    if not alone:
        return f"{found[0]['steps']:,}"
    return f"{found[0]['steps']:,}; {'≤ ' if len(alone) == 1 else ''}{min(alone):.1f} s"


def speed_list(rows: list[dict[str, Any]]) -> list[str]:
    """Accuracy and time of the runs that are to reach 94 %; those that shared the GPU are not timed."""
    found = named(rows, "speed")
    accuracies = [100 * (row["accuracy"] or 0.0) for row in found]
    seconds = [row["seconds"] for row in found if not row.get("shared") and "seconds" in row]
    return [
        f"- {found[0]['name'].rsplit(' seed ', 1)[0][6:]}: {percent(found)}, {min(accuracies):.2f} to "
        f"{max(accuracies):.2f}, {sum(each >= 94 for each in accuracies)} of {len(found)} at 94 % or more",
        f"- seconds of training and evaluation, alone on the GPU: median {statistics.median(seconds):.2f}, "
        f"{min(seconds):.2f} to {max(seconds):.2f} (n={len(seconds)})",
    ]


def reach_list(rows: list[dict[str, Any]]) -> list[str]:
    """What was tried on held-out images for 94 % at 2,048, and for sony at 14,720."""
    kinds = dict.fromkeys(row["name"].rsplit(" seed ", 1)[0] for row in named(rows, "reach"))
    return [f"- {kind[6:]}: {percent(named(rows, kind, 'seed'))}" for kind in kinds]


def tune_list(rows: list[dict[str, Any]]) -> list[str]:
    """The second look: three other settings at three steps an epoch, one after the other."""
    found = [row for row in named(rows, "tune") if row["accuracy"] is not None]
    return [f"- {row['name'][5:].rsplit(' seed ', 1)[0]}: {100 * row['accuracy']:.2f}" for row in found]


def codes_list(rows: list[dict[str, Any]]) -> list[str]:
    """1-bit codes on four ranks beside the dense runs of the table."""
    lines = []
    for recipe in ("plain", "onebit"):
        coded, dense = named(rows, "codes", recipe, "2048"), named(rows, "table", recipe, "2048")
        if coded and dense:
            lines.append(f"- {recipe}: {percent(coded)} with codes, {percent(dense)} dense")
    return lines


def epochs_to(rows: list[dict[str, Any]], target: float) -> list[tuple[int, float]]:
    """Batch and epochs at which `lars` reaches the target, read on logarithmic scales of epochs and error.

    Between the two lengths around the target, or beyond the longest where it is missed by less than half a point.
    """
    lengths: dict[int, dict[float, float]] = {}
    for row in (*named(rows, "law", "lars"), *named(rows, "table", "lars")):
        if row["seed"] == 0:
            lengths.setdefault(int(row["name"].split()[2]), {})[row["epochs"]] = row["accuracy"]
    points = []
    for batch, reached in sorted(lengths.items()):
        errors = [(math.log(epochs), math.log(1 - reached[epochs])) for epochs in sorted(reached)]
        goal = math.log(1 - target)
        for (x0, y0), (x1, y1) in itertools.pairwise(errors):
            if y0 >= goal >= y1 or (x1 == errors[-1][0] and math.exp(y1) < 1 - target + 0.005):
                points.append((batch, math.exp(x0 + (x1 - x0) * (y0 - goal) / (y0 - y1))))
                break
    return points


def law_list(rows: list[dict[str, Any]]) -> list[str]:
    """The law of epochs against batch, and the noise scale beside its critical batch."""
    points = epochs_to(rows, 0.9)
    law = fit_law(points, 90.0, "lars")
    ends = [(row["name"], row["noise"][-1][1]) for row in named(rows, "law", "lars") if "512 " not in row["name"]]
    return [
        "- epochs to 90 %: " + ", ".join(f"{epochs:.1f} at {batch:,}" for batch, epochs in points),
        f"- E = {law.base_epochs:.2f} + {law.slope:.5f} B, off by {law.worst_residual:.1f} epochs at most; "
        f"critical batch {law.critical_batch:,.0f}",
        "- noise scale at the end: " + ", ".join(f"{scale:,} ({name})" for name, scale in ends),
    ]


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
        text += ["", "## Steps, and seconds of training and evaluation", ""]
        text += [
            "The least of the seeds that had the GPU to themselves; behind a `≤` only one had, and may have compiled.",
            "",
            *cost_table(rows),
        ]
    if named(rows, "speed"):
        text += ["", "## 94 % at 2,048", "", *speed_list(rows)]
    if named(rows, "reach"):
        text += ["", "What led there, and to the growth of sony's batch at 14,720; percent of held-out images:", ""]
        text += reach_list(rows)
    if named(rows, "earlier"):
        kinds = sorted({row["name"].rsplit(" seed ", 1)[0] for row in named(rows, "earlier")})
        text += [
            "",
            "Before (sony grew at 10 and 20, plain warmed up for 5 epochs, fastai's rate saturated at 1,024):",
            "",
        ]
        text += [f"- {kind[14:]}: {percent(named(rows, kind, 'seed'))}" for kind in kinds]
    for part, title in (("norms", "Batch norm by worker and over the whole batch"), ("curves", "Fused and plain")):
        kinds = sorted({row["name"].rsplit(" seed ", 1)[0] for row in named(rows, part)})
        if kinds:
            text += ["", f"## {title}", ""]
            text += [f"- {kind}: {percent(named(rows, kind, 'seed'))}" for kind in kinds]
    if named(rows, "tune"):
        text += [
            "",
            "## A second look at 14,720: three steps an epoch of 45,000 images, percent of held-out images",
            "",
        ]
        text += tune_list(rows)
    text += ["", "## 1-bit codes, four ranks that share the GPU, batch 2,048", "", *codes_list(rows)]
    if named(rows, "law"):
        text += ["", "## Epochs against batch (`lars`, one seed)", "", *law_list(rows)]
    text += tables(rows)
    draw(rows, HERE.parents[2] / "docs" / "tour" / "cifar10.svg")
    (HERE / "summary.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
