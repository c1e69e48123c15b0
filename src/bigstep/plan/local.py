"""Compare the planner with measured runs on shaped links; a probe gives its constants, the runs give none.

A measured run is a mapping: `name`, `kind` (sync or server), `model` (or a workload file), `world`, `rate_mbit_s` and
`seconds` (of a step, or of one update of the server), and, where they apply, `ranks_per_node`, `inside_mbit_s`,
`collective`, `codec`, `grid`, `bucket_mb`, `overlap`, `local_batch`, `servers`, `workload` (a measured one, as in a
workload file), `compute_s` (the rank's own work in a step, over which the workload's times are spread), `after_s` (the
part of it after the exchange; by default the workload's update), `free_s` (the step time on unlimited links, which no
slower link can beat) and `burst_byte`, `inside_burst_byte` (bytes that a shaper lets through at once after a pause).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bigstep.errors import DataError
from bigstep.plan.cluster import Cluster
from bigstep.plan.cost import Phase
from bigstep.plan.scheme import Scheme, codec_seconds, make_buckets
from bigstep.plan.server import predict_server
from bigstep.plan.simulate import Prediction, exchanges, predict
from bigstep.plan.workload import Workload

__all__ = ["compare_runs", "crossing_rate", "encoding_s", "last_exchange_s", "meeting_rate", "predict_run"]

_REQUIRED = ("name", "model", "world", "rate_mbit_s", "seconds")


def predict_run(run: Mapping[str, Any], machine: Cluster) -> float:
    """Predict the seconds of one step (or of one server update) of a measured run.

    Args:
        run: The run, as described at the top of this module.
        machine: This machine, as probed; its `between` link is given the rate of the run.
    """
    missing = [field for field in _REQUIRED if field not in run]
    if missing:
        raise DataError(f"The measured run {run.get('name', '')!r} lacks {missing[0]!r}; measure it again.")
    workload, cluster = _given(run, machine)
    world, local_batch = int(run["world"]), float(run.get("local_batch", 1))
    if run.get("kind") == "server":
        found = predict_server(workload, cluster, workers=world, local_batch=local_batch,
                               servers=int(run.get("servers", 1)), codec=str(run.get("codec", "none")))  # fmt: skip
        return 1 / found.updates_s
    scheme = _scheme(run)
    step = predict(workload, cluster, devices=world, local_batch=local_batch, scheme=scheme)
    bursts = {"between": float(run.get("burst_byte", 0.0)), "inside": float(run.get("inside_burst_byte", 0.0))}
    saved = _burst_seconds(step, exchanges(workload, cluster, world, scheme), cluster, bursts)
    fastest = predict(workload, _unlimited(cluster), devices=world, local_batch=local_batch, scheme=scheme)
    return max(step.step_s - saved, fastest.step_s, float(run.get("free_s", 0.0)))


def last_exchange_s(run: Mapping[str, Any], machine: Cluster) -> float:
    """Predict the seconds of the last bucket's exchange and decoding: the least that follows the last gradient."""
    workload, cluster = _given(run, machine)
    scheme, world = _scheme(run), int(run["world"])
    last = make_buckets(workload, scheme.bucket_mb)[-1]
    _, decode = codec_seconds(scheme.codec, last.values, cluster, world)
    return decode + sum(phase.seconds for phase in exchanges(workload, cluster, world, scheme)[-1])


def encoding_s(run: Mapping[str, Any], machine: Cluster) -> float:
    """Predict the seconds of encoding all buckets of a step."""
    workload, cluster = _given(run, machine)
    scheme = _scheme(run)
    buckets = make_buckets(workload, scheme.bucket_mb)
    return sum(codec_seconds(scheme.codec, bucket.values, cluster, int(run["world"]))[0] for bucket in buckets)


def _scheme(run: Mapping[str, Any]) -> Scheme:
    grid = run.get("grid")
    return Scheme(
        collective=str(run.get("collective", "ring")),
        codec=str(run.get("codec", "none")),
        grid=(int(grid[0]), int(grid[1])) if grid else None,
        bucket_mb=float(run.get("bucket_mb", 25)),
        overlap=bool(run.get("overlap", True)),
        pipelined=bool(run.get("pipelined", False)),
        in_flight=bool(run.get("in_flight", False)),
    )


def _given(run: Mapping[str, Any], machine: Cluster) -> tuple[Workload, Cluster]:
    """The run's model with its times on this machine, and the machine with the run's links."""
    per_node = int(run.get("ranks_per_node", 1))
    inside = machine.inside
    if run.get("inside_mbit_s"):
        inside = dataclasses.replace(inside, bandwidth_byte_s=run["inside_mbit_s"] * 1e6 / 8)
    cluster = dataclasses.replace(
        machine.with_bandwidth(run["rate_mbit_s"] * 1e6 / 8),
        nodes=-(-int(run["world"]) // per_node),
        devices_per_node=per_node,
        adapters_per_node=int(run.get("adapters_per_node", 1)),
        inside=inside,
    )
    if run.get("workload"):
        workload = Workload.from_mapping(dict(run["workload"]), str(run["name"]))
        return _scaled(workload, float(run["compute_s"]), float(run.get("after_s", workload.optimizer_s))), cluster
    workload = Workload.load(str(run["model"]))
    if "compute_s" in run:
        compute_s = max(float(run["compute_s"]), 1e-9)
        speed = workload.step_flops * float(run.get("local_batch", 1)) / compute_s
        cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, flop_s=speed, launch_s=0.0))
        workload = dataclasses.replace(workload, measured_batch=0, optimizer_s=1e-9)
    return workload, cluster


def _unlimited(cluster: Cluster) -> Cluster:
    fast = {
        name: dataclasses.replace(getattr(cluster, name), bandwidth_byte_s=math.inf) for name in ("inside", "between")
    }
    return dataclasses.replace(cluster, **fast)


def _scaled(workload: Workload, own_s: float, after_s: float) -> Workload:
    """The same workload with times that add up to `own_s`, of which `after_s` follow the exchange.

    Time beyond that of the measured layers is due to the exchange. No exchange runs during the forward pass, so this
    time is added to the backward pass. If `own_s` is shorter, all times shrink in proportion.
    """
    forward, backward = (sum(getattr(layer, name) for layer in workload.layers) for name in ("forward_s", "backward_s"))
    measured = forward + backward + after_s
    shrunk = min(1.0, max(own_s, 1e-9) / measured)
    longer = 1 + max(0.0, own_s - measured) / backward
    layers = tuple(
        dataclasses.replace(layer, forward_s=layer.forward_s * shrunk, backward_s=layer.backward_s * shrunk * longer)
        for layer in workload.layers
    )
    return dataclasses.replace(workload, layers=layers, optimizer_s=after_s * shrunk)


def _burst_seconds(
    step: Prediction, buckets: Sequence[Sequence[Phase]], cluster: Cluster, bursts: Mapping[str, float]
) -> float:
    """Seconds that token buckets save in a step: after a pause a burst passes at once, at most what the pause held up.

    saved = min(pause, burst / rate), for each pause of each level

    A level pauses once per step; the links inside nodes pause again while the exchange is between nodes, since
    two-level collectives begin and end inside.
    """
    busy = {"inside": 0.0, "between": 0.0}
    for phase in (phase for bucket in buckets for phase in bucket):
        busy[phase.level] += phase.seconds - phase.rounds_s
    pauses = {
        "between": [step.step_s - busy["between"]],
        "inside": [step.step_s - step.exchange_s, busy["between"]] if busy["inside"] else [],
    }
    rates = {"inside": cluster.inside.bandwidth_byte_s, "between": cluster.between.bandwidth_byte_s}
    return sum(min(pause, bursts[level] / rates[level]) for level in pauses for pause in pauses[level])


def compare_runs(runs: Sequence[Mapping[str, Any]], machine: Cluster) -> dict[str, Any]:
    """Compare predictions with measured runs; the result is for `render`.

    >>> run = {"name": "two ranks", "model": "mlp", "world": 2, "rate_mbit_s": 100, "compute_s": 0.001, "seconds": 1}
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
                "counts": bool(run.get("counts", True)),
            }
        )
    errors = [abs(row["error"]) for row in rows if row["counts"]]
    if not errors:
        raise DataError("There are no measured runs to compare with; run the laboratory first.")
    summary = {"runs": len(errors), "mean_error": sum(errors) / len(errors), "worst_error": max(errors)}
    return {"kind": "local-validation", "rows": rows, "summary": summary}


def crossing_rate(rates: Sequence[float], plain: Sequence[float], compressed: Sequence[float]) -> float | None:
    """The rate below which compression is faster and above which it is slower, by log-log interpolation.

    Returns:
        The rate; None if the curves do not cross, or cross more than once: then they differ by less than the noise of
        the measurement, and any rate would be a coincidence.

    >>> round(crossing_rate([10, 100, 1000], [10, 1, 0.1], [2, 1.5, 1.45]), 1)
    62.9
    >>> crossing_rate([10, 100, 1000], [10, 1, 1], [2, 1.1, 0.9]) is None
    True
    """
    gaps = [math.log(a) - math.log(b) for a, b in zip(plain, compressed, strict=True)]
    faster = [gap > 0 for gap in gaps]
    count = sum(faster)
    if not 0 < count < len(gaps) or not all(faster[:count]):
        return None
    (low, high), (first, second) = rates[count - 1 : count + 1], gaps[count - 1 : count + 1]
    return math.exp(math.log(low) + (math.log(high) - math.log(low)) * first / (first - second))


def meeting_rate(saved: Callable[[float], float]) -> float | None:
    """The rate, from 1 to 10^6 Mbit/s, at which the time saved by compression falls to zero; None if there is none.

    >>> round(meeting_rate(lambda rate: 100 / rate - 0.25), 3)
    400.0
    >>> meeting_rate(lambda rate: 100 / rate + 0.25) is None
    True
    """
    low, high = 1.0, 1e6
    if not saved(low) > 0 > saved(high):
        return None
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if saved(middle) > 0 else (low, middle)
    return math.sqrt(low * high)
