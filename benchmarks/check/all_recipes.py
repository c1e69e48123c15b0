"""Check every synchronous recipe on 1, 2 and 4 ranks and keep the table.

    python benchmarks/check/all_recipes.py [--preset mini] [--ranks 1,2,4] [RECIPE ...]

Each recipe gets processes of its own, as `bigstep check RECIPE` does, so that its time is what a user waits. Writes
result.json and result.md beside this file; the exit status is 1 if any property fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from bigstep import recipes
from bigstep.check import Report, check
from bigstep.records import describe_machine

HERE = Path(__file__).parent


def markdown(reports: dict[str, Report], machine: str) -> str:
    """One line a property, one column a recipe; what is measured stands in result.json."""
    names = list(reports)
    first = next(iter(reports.values()))
    lines = [
        f"Figures of `bigstep check` on {', '.join(map(str, first.ranks))} ranks; {machine}.",
        "",
        "| property | bound | " + " | ".join(names) + " |",
        "|---|---" + "|---" * len(names) + "|",
    ]
    for index, row in enumerate(first.rows):
        cells = []
        for report in reports.values():
            mine = report.rows[index]
            figure = "" if mine.figure is None else f" {mine.figure:.2g}"
            cells.append({"pass": "✓", "fail": "**FAIL**", "not applicable": "–", "not run": "…"}[mine.status] + figure)
        bounds = sorted({f"{r.rows[index].bound:.2g}" for r in reports.values() if r.rows[index].bound is not None})
        lines.append(f"| {row.name} | {' or '.join(bounds)} | " + " | ".join(cells) + " |")
    lines.append("| seconds | 120 | " + " | ".join(f"{report.seconds:.0f}" for report in reports.values()) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="all synchronous ones by default")
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--ranks", default="1,2,4")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.ranks.split(",")]
    reports = {}
    for name in arguments.recipes or recipes.NAMES:
        config = recipes.load(name, arguments.preset)
        if config.asynchronous.method != "none":
            continue
        reports[name] = check(config, ranks=sizes)
        print(reports[name].summary(), flush=True)
    machine = {**describe_machine(), "load": os.getloadavg()[0]}
    facts = {"machine": machine, "reports": {name: report.to_mapping() for name, report in reports.items()}}
    (HERE / "result.json").write_text(json.dumps(facts, indent=1) + "\n")
    hardware, versions = machine["hardware"], machine["versions"]
    words = (
        f"{hardware['cores']} cores of {hardware['processor']}, torch {versions['torch']}, commit {machine['commit']}, "
        f"load {machine['load']:.1f} at the end"
    )
    (HERE / "result.md").write_text(markdown(reports, words))
    return 0 if all(report.passed for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
