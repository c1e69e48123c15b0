"""`bigstep plan --validate-local`: real training steps on shaped links beside the planner's predictions.

First the machine is measured in the laboratory on links that do not limit it (`bigstep.bench.local_machine`). Then
every run of the grid (`bigstep.bench.local_grid`) is measured, and predicted from those constants and the rate of its
links.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigstep.bench.local_grid import networks
from bigstep.bench.local_machine import as_cluster, describe_run, layout, measure_machine, run_in_lab, with_constants
from bigstep.errors import RunError
from bigstep.plan.cluster import Cluster
from bigstep.plan.local import compare_runs, crossing_rate, predict_run
from bigstep.records import describe_machine, write_atomically

__all__ = ["measure", "validate_local"]

Tell = Callable[[str], object]


def measure(*, quick: bool = False, only: str = "", tell: Tell = lambda line: None) -> dict[str, Any]:
    """Measure the machine and every run; needs root and `ip netns`. About 5 minutes, 1 where it has to be quick."""
    started = time.monotonic()
    grid = [(network, cases) for network, cases in networks(quick) if only in json.dumps(network)]
    machines = {}
    for name in dict.fromkeys(layout(network) for network, _ in grid):
        tell(f"machine, hosts x nodes {name}")
        machines[name] = measure_machine(name, grid, quick)
    runs = []
    for network, cases in grid:
        tell(" ".join(f"{key}={value}" for key, value in network.items()))
        for each, found in zip(cases, run_in_lab(network, cases), strict=True):
            runs.append(describe_run(network, each, found["seconds"], found["spread"]))
    return {
        "machines": machines,
        "runs": runs,
        "seconds": time.monotonic() - started,
        "measured_on": describe_machine(),
    }


def validate_local(
    path: Path, *, measured: Path | None = None, quick: bool = False, only: str = "", tell: Tell = lambda line: None
) -> dict[str, Any]:
    """Measure (or read what was measured), predict, compare, and write all of it as JSON.

    Args:
        path: Where to write the result.
        measured: A file of an earlier call, to predict its runs again without measuring.
        quick: Five runs instead of 62.
        only: Leave out networks whose arguments, written as JSON, do not contain this text.
        tell: Called with a line of text as the work goes on.

    Returns:
        The result; `bigstep.plan.render` prints it.
    """
    content = json.loads(measured.read_text()) if measured else measure(quick=quick, only=only, tell=tell)
    if not content.get("runs"):
        raise RunError("The laboratory measured no runs.")
    by_world: dict[str, list[dict[str, Any]]] = {}
    for run in content["runs"]:
        machine = content["machines"][run["layout"]]
        by_world.setdefault(run["layout"], []).append(with_constants(run, machine))
    rows = [
        row
        for name, runs in by_world.items()
        for row in compare_runs(runs, as_cluster(content["machines"][name]))["rows"]
    ]
    errors = [abs(row["error"]) for row in rows if row["counts"]]
    result = {
        "kind": "local-validation",
        "rows": rows,
        "summary": {"runs": len(errors), "mean_error": sum(errors) / len(errors), "worst_error": max(errors)},
        "crossovers": [
            found
            for name, runs in by_world.items()
            for found in _crossovers(runs, as_cluster(content["machines"][name]))
        ],
        **{key: content[key] for key in ("machines", "runs", "seconds", "measured_on") if key in content},
    }
    write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
    return result


def _crossovers(runs: list[dict[str, Any]], machine: Cluster) -> list[dict[str, Any]]:
    """Where 1-bit and the float32 ring cross, measured and predicted, for each model; None where they do not."""
    found = []
    for model in sorted({run["model"] for run in runs}):
        curves: dict[str, dict[float, tuple[float, float]]] = {"ring none": {}, "gather onebit": {}}
        for run in runs:
            key = f"{run.get('collective')} {run.get('codec')}"
            if run["model"] == model and key in curves and run["ranks_per_node"] == 1:
                predicted = predict_run(run, machine)
                curves[key][run["rate_mbit_s"]] = run["seconds"], predicted
        rates = sorted(set(curves["ring none"]) & set(curves["gather onebit"]))
        if len(rates) < 2:
            continue
        plain, onebit = ([curves[key][rate] for rate in rates] for key in curves)
        crossings = [
            crossing_rate(rates, [row[side] for row in plain], [row[side] for row in onebit]) for side in (0, 1)
        ]
        found.append(
            {
                "hosts": runs[0]["world"],
                "model": model,
                "measured_mbit_s": crossings[0],
                "predicted_mbit_s": crossings[1],
            }
        )
    return found
