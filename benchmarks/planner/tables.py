"""Write the generated tables of docs/planner.md anew: python benchmarks/planner/tables.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bigstep.plan import Cluster
from bigstep.plan.cluster import cluster_names
from bigstep.plan.rows import Assumed
from bigstep.plan.validate import Checked, check_rows, summarise

LOCAL = Path(__file__).parent / "local.json"
DOCUMENT = Path(__file__).parents[2] / "docs" / "planner.md"


def validation_table(rows: list[Checked]) -> str:
    lines = ["| system | quantity | published | predicted | error | counts |", "|---|---|---|---|---|---|"]
    for row in rows:
        counts = "yes" if row.role == "predicted" else row.role
        note = f"; {row.note}" if row.note else ""
        lines.append(
            f"| {row.system} | {row.quantity} | {row.published:,.4g} {row.unit} | {row.predicted:,.4g} | "
            f"{100 * row.error:+.1f} % | {counts}{note} |"
        )
    return "\n".join(lines)


def summary_table(rows: list[Checked]) -> str:
    summary = summarise(rows)
    lines = [
        f"{summary['predicted']} rows count: mean absolute error **{100 * summary['mean_error']:.1f} %**, worst "
        f"**{100 * summary['worst_error']:.1f} %**. {summary['sets_a_constant']} rows set a constant and "
        f"{summary['contradicted']} are contradicted by their own paper; neither kind counts.",
        "",
        "| system | mean absolute error |",
        "|---|---|",
    ]
    lines += [f"| {name} | {100 * error:.1f} % |" for name, error in summary["mean_error_by_system"].items()]
    return "\n".join(lines)


def sensitivity_table() -> str:
    cases = {
        "as assumed": Assumed(),
        **{f"jitter {100 * jitter:g} %": Assumed(jitter=jitter) for jitter in (0.0, 0.01, 0.02, 0.04)},
        "no overhead of an MLPerf run": Assumed(run_overhead_s=0.0),
        "Mikami's exchange overlaps backward": Assumed(mikami_overlap=True),
        "Yamazaki with halving and doubling": Assumed(yamazaki_collective="halving"),
        "Yamazaki with hierarchical": Assumed(yamazaki_collective="hierarchical"),
    }
    lines = ["| assumption | mean error | worst error |", "|---|---|---|"]
    for name, assumed in cases.items():
        summary = summarise(check_rows(assumed))
        lines.append(f"| {name} | {100 * summary['mean_error']:.1f} % | {100 * summary['worst_error']:.1f} % |")
    return "\n".join(lines)


def constants_table() -> str:
    lines = ["| cluster | figure | source |", "|---|---|---|"]
    for name in cluster_names():
        lines += [f"| {name} | {field} | {source} |" for field, source in Cluster.load(name).sources.items()]
    return "\n".join(lines)


def local_table(result: dict[str, Any]) -> str:
    summary, hardware = result["summary"], result["measured_on"]["hardware"]
    rows = result["rows"]
    near = [sum(1 for row in rows if row["counts"] and abs(row["error"]) <= limit) for limit in (0.05, 0.12)]
    lines = [
        f"{hardware['processor']}, {hardware['cores']} cores, all ranks on it; n = {summary['runs']} runs that "
        f"count: mean absolute error **{100 * summary['mean_error']:.1f} %**, worst "
        f"**{100 * summary['worst_error']:.1f} %**; {near[0]} runs within 5 %, {near[1]} within 12 %.",
        "",
        "| run | measured ms | interquartile range | predicted ms | error | counts |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['measured_ms']:.1f} | {1e3 * row['spread']:.1f} | {row['predicted_ms']:.1f} | "
        f"{100 * row['error']:+.1f} % | {'yes' if row['counts'] else 'no'} |"
        for row in rows
    ]
    return "\n".join(lines)


def crossover_table(result: dict[str, Any]) -> str:
    lines = [
        "| 1-bit against | model | hosts | buckets | dense, 1-bit ms at Mbit/s | measured Mbit/s | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in result["crossovers"]:
        curve = "; ".join(
            f"{dense:.1f}, {onebit:.1f} at {rate:g}"
            for rate, dense, onebit in zip(found["rates_mbit_s"], found["dense_ms"], found["onebit_ms"], strict=True)
        )
        measured, predicted = (
            f"{found[key]:.0f}" if found[key] else "none" for key in ("measured_mbit_s", "predicted_mbit_s")
        )
        error = f"{100 * found['error']:+.1f} %" if found["error"] is not None else ""
        lines.append(
            f"| {found['dense']} | {found['model']} | {found['world']} | {found['bucket_mb']:g} MB | {curve} | "
            f"{measured} | {predicted} | {error} |"
        )
    return "\n".join(lines)


def fill(text: str, tables: dict[str, str]) -> str:
    for name, table in tables.items():
        start, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n{table}\n{end}{tail}"
    return text


def main() -> None:
    rows = check_rows()
    local = json.loads(LOCAL.read_text(encoding="utf-8"))
    tables = {
        "summary": summary_table(rows),
        "validation": validation_table(rows),
        "sensitivity": sensitivity_table(),
        "constants": constants_table(),
        "local": local_table(local),
        "crossover": crossover_table(local),
    }
    DOCUMENT.write_text(fill(DOCUMENT.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
