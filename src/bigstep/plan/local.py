"""Hold the planner to measured runs on shaped links: the constants of the machine from a probe, nothing from the runs.

A measured run is a mapping: `name`, `kind` (sync or server), `model` (or a workload file), `world`, `rate_mbit_s` and
`seconds` (median of a step, or of one update of the server), and where they apply `ranks_per_node`, `inside_mbit_s`,
`collective`, `codec`, `grid`, `bucket_mb`, `overlap`, `local_batch` and `servers`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bigstep.errors import DataError
from bigstep.plan.cluster import Cluster
from bigstep.plan.method import Method
from bigstep.plan.server import predict_server
from bigstep.plan.simulate import predict
from bigstep.plan.workload import Workload

__all__ = ["compare_runs", "crossing_rate", "predict_run"]

_REQUIRED = ("name", "model", "world", "rate_mbit_s", "seconds")


def predict_run(run: Mapping[str, Any], machine: Cluster, *, exchange_only: bool = False) -> float:
    """Predict the seconds of one step (or of one server update) of a measured run.

    Args:
        run: The run, as described at the head of this module.
        machine: This machine, as probed; its `between` link gets the run's rate.
        exchange_only: Leave out compute and update, for runs that only exchange.
    """
    missing = [field for field in _REQUIRED if field not in run]
    if missing:
        raise DataError(f"The measured run {run.get('name', '')!r} lacks {missing[0]!r}; measure it again.")
    per_node = int(run.get("ranks_per_node", 1))
    world = int(run["world"])
    inside = machine.inside
    if run.get("inside_mbit_s"):
        inside = dataclasses.replace(inside, bandwidth_byte_s=run["inside_mbit_s"] * 1e6 / 8)
    cluster = dataclasses.replace(
        machine.with_bandwidth(run["rate_mbit_s"] * 1e6 / 8),
        nodes=-(-world // per_node),
        devices_per_node=per_node,
        adapters_per_node=int(run.get("adapters_per_node", 1)),
        inside=inside,
    )
    workload = Workload.load(str(run["model"]))
    if exchange_only or run.get("exchange_only"):
        # a millionth of the compute stands for none, so that the order of buckets stays
        cluster = dataclasses.replace(
            cluster, jitter=0.0, device=dataclasses.replace(cluster.device, flop_s=1e21, launch_s=0.0)
        )
        workload = dataclasses.replace(workload, measured_batch=0, optimizer_s=1e-9)
    local_batch = float(run.get("local_batch", 1))
    if run.get("kind") == "server":
        found = predict_server(workload, cluster, workers=world, local_batch=local_batch,
                               servers=int(run.get("servers", 1)), codec=str(run.get("codec", "none")))  # fmt: skip
        return 1 / found.updates_s
    grid = run.get("grid")
    method = Method(
        collective=str(run.get("collective", "ring")),
        codec=str(run.get("codec", "none")),
        grid=(int(grid[0]), int(grid[1])) if grid else None,
        bucket_mb=float(run.get("bucket_mb", 25)),
        overlap=bool(run.get("overlap", True)),
        pipelined=bool(run.get("pipelined", False)),
    )
    return predict(workload, cluster, devices=world, local_batch=local_batch, method=method).step_s


def compare_runs(runs: Sequence[Mapping[str, Any]], machine: Cluster) -> dict[str, Any]:
    """Set predictions beside measured runs; the result is what `render` prints.

    >>> run = {"name": "two ranks", "model": "mlp", "world": 2, "rate_mbit_s": 100, "exchange_only": True, "seconds": 1}
    >>> machine = Cluster.load("big_basin")
    >>> exact = predict_run(run, machine)
    >>> round(compare_runs([run | {"seconds": exact}], machine)["summary"]["mean_error"], 9)
    0.0
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        predicted = predict_run(run, machine)
        measured = float(run["seconds"])
        rows.append(
            {
                "name": str(run["name"]),
                "measured_ms": measured * 1e3,
                "predicted_ms": predicted * 1e3,
                "error": predicted / measured - 1,
                "spread": run.get("spread"),
            }
        )
    errors = [abs(row["error"]) for row in rows]
    if not errors:
        raise DataError("There are no measured runs to compare with; run the laboratory first.")
    summary = {"runs": len(rows), "mean_error": sum(errors) / len(errors), "worst_error": max(errors)}
    return {"kind": "local-validation", "rows": rows, "summary": summary}


def crossing_rate(rates: Sequence[float], plain: Sequence[float], compressed: Sequence[float]) -> float | None:
    """The rate at which two measured curves cross, straight between points in log-log; None where they do not.

    >>> round(crossing_rate([10, 100, 1000], [10, 1, 0.1], [2, 1.5, 1.45]), 1)
    62.9
    """
    gaps = [math.log(a) - math.log(b) for a, b in zip(plain, compressed, strict=True)]
    for (low, high), (first, second) in zip(
        zip(rates, rates[1:], strict=False), zip(gaps, gaps[1:], strict=False), strict=True
    ):
        if first > 0 >= second:
            return math.exp(math.log(low) + (math.log(high) - math.log(low)) * first / (first - second))
    return None
