"""`bigstep plan --validate-local`: real training steps on shaped links beside the planner's predictions.

First the machine is measured in the laboratory on links that do not limit it (`bigstep.lab.machine`). Then
every case (`bigstep.lab.cases`) is measured, and predicted from those constants and the rates of its
links.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigstep.errors import RunError
from bigstep.lab.cases import networks
from bigstep.lab.crossover import find_crossovers
from bigstep.lab.machine import as_cluster, layout, measure_world, own_times, with_constants
from bigstep.plan.local import compare_runs
from bigstep.records import describe_machine, write_atomically

__all__ = ["measure", "validate_local"]

Tell = Callable[[str], object]


def measure(*, quick: bool = False, only: str = "", tell: Tell = lambda line: None) -> dict[str, Any]:
    """Measure the machine and every run; needs root and `ip netns`. Takes about 15 minutes, or 1 if `quick`."""
    started = time.monotonic()
    grid = [(network, cases) for network, cases in networks(quick) if only in json.dumps(network)]
    machines, runs = {}, []
    for name in dict.fromkeys(layout(network) for network, _ in grid):
        mine = [(network, cases) for network, cases in grid if layout(network) == name]
        tell(f"hosts x nodes {name}: {', '.join(network['rate'] for network, _ in mine)}")
        machines[name], found = measure_world(mine, quick)
        runs += found
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
        measured: The result file of an earlier call, whose runs are predicted again without measuring.
        quick: A few runs instead of all.
        only: Leave out networks whose arguments, written as JSON, do not contain this text.
        tell: Called with a line of text as the work goes on.

    Returns:
        The result; `bigstep.plan.render` prints it.
    """
    content = json.loads(measured.read_text()) if measured else measure(quick=quick, only=only, tell=tell)
    if not content.get("runs"):
        raise RunError("The laboratory measured no runs.")
    by_world = {
        name: [with_constants(run, machine, own) for run in content["runs"] if run["layout"] == name]
        for name, machine in content["machines"].items()
        for own in (own_times(machine),)
    }
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
            for found in find_crossovers(runs, as_cluster(content["machines"][name]))
        ],
        **{key: content[key] for key in ("machines", "runs", "seconds", "measured_on") if key in content},
    }
    write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
    return result
