"""`bigstep plan --validate-local`: real training steps on shaped links beside the planner's predictions.

First the machine is measured in the laboratory on links that do not limit it: rounds, copies and codecs of each world,
and compute of each model. Then every run of the grid is measured, and predicted from those constants and the rate of
its links.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from bigstep.bench import lab_host
from bigstep.bench.lab import Lab, bits_per_second
from bigstep.bench.probe_links import fit_cost, without_codec
from bigstep.errors import RunError
from bigstep.plan.cluster import Cluster
from bigstep.plan.local import compare_runs, crossing_rate, predict_run
from bigstep.records import write_atomically

__all__ = ["measure", "validate_local"]

FREE = "20gbit"
"""A rate that no rank of one machine reaches."""
PAYLOAD = 1448 / 1514
"""Share of an Ethernet frame that TCP with time stamps carries, as shapers count frames."""
BATCHES = {"mlp": 16, "resnet9": 2}
DENSE = [("ring", "none"), ("ring", "fp16"), ("halving", "none"), ("torus", "none")]
# below 50 Mbit/s the 100 ms of queue that a shaper holds are shorter than a message: packets are lost
FLAT_RATES = ("50mbit", "100mbit", "200mbit", "400mbit")
LEVELS = [("100mbit", "20mbit"), ("200mbit", "50mbit"), ("400mbit", "100mbit")]
SERVER_RATES = ("50mbit", "100mbit", "200mbit")
CROSSING_RATES = ("250mbit", "500mbit", "1gbit", "2gbit", "4gbit")

Network = tuple[dict[str, Any], list[dict[str, Any]]]


def _case(collective: str, codec: str, model: str = "mlp", *, steps: int = 7, counts: bool = True) -> dict[str, Any]:
    return {
        "kind": "sync",
        "model": model,
        "collective": collective,
        "codec": codec,
        "grid": [],
        "bucket_mb": 4.0,
        "local_batch": BATCHES[model],
        "steps": steps,
        "counts": counts,
    }


def _server(steps: int) -> dict[str, Any]:
    return {"kind": "server", "model": "mlp", "codec": "none", "steps": steps, "local_batch": 1, "counts": True}


def _networks(quick: bool) -> list[Network]:
    """Laboratories, and the cases each of them runs: 52 runs that count and 10 for the crossover; 5 if quick."""
    if quick:
        levels = [_case("torus", "none", steps=3), _case("hierarchical", "none", steps=3)]
        return [
            (
                {"hosts": 2, "rate": "20mbit"},
                [_case("ring", "none", steps=3), _case("gather", "onebit", "resnet9", steps=3)],
            ),
            ({"hosts": 4, "rate": "100mbit", "nodes": 2, "rate_between": "20mbit"}, levels),
            ({"hosts": 3, "rate": "50mbit"}, [_server(6)]),
        ]
    flat = [*(_case(*way) for way in DENSE), _case("gather", "onebit", "resnet9")]
    levels = [_case("torus", "none"), _case("torus", "fp16"), _case("hierarchical", "none")]
    crossing = [_case(*way, steps=25, counts=False) for way in (("ring", "none"), ("gather", "onebit"))]
    networks: list[Network] = [({"hosts": hosts, "rate": rate}, flat) for hosts in (2, 4) for rate in FLAT_RATES]
    for rate, between in LEVELS:
        networks.append(({"hosts": 4, "rate": rate, "nodes": 2, "rate_between": between}, levels))
    networks += [({"hosts": 3, "rate": rate}, [_server(12)]) for rate in SERVER_RATES]
    networks += [({"hosts": 2, "rate": rate}, crossing) for rate in CROSSING_RATES]
    return networks


def measure(*, quick: bool = False, tell: Any = None) -> dict[str, Any]:
    """Measure the machine and every run; needs root and `ip netns`. About 8 minutes, 1 where it has to be quick."""
    networks = _networks(quick)
    say = tell or (lambda text: None)
    started = time.monotonic()
    machines = {}
    for hosts in sorted({network["hosts"] for network, _ in networks}):
        say(f"machine with {hosts} ranks")
        machines[str(hosts)] = _measure_machine(hosts, networks, quick)
    runs = []
    for network, cases in networks:
        say(" ".join(f"{key}={value}" for key, value in network.items()))
        for case, found in zip(cases, _in_lab(network, cases), strict=True):
            runs.append(_run(network, case, found, machines[str(network["hosts"])]))
    return {"machines": machines, "runs": runs, "seconds": time.monotonic() - started}


def _in_lab(network: dict[str, Any], cases: list[dict[str, Any]]) -> list[Any]:
    with Lab(**network) as lab:
        answers: list[list[Any]] = lab.run(lab_host.__file__, json.dumps(cases), timeout=300)
    return answers[0]


def _measure_machine(hosts: int, networks: list[Network], quick: bool) -> dict[str, Any]:
    """Costs of collectives and codecs in a world of this size, and compute of its models, on a free network."""
    steps = [
        case for network, cases in networks if network["hosts"] == hosts for case in cases if case["kind"] == "sync"
    ]
    models = sorted({case["model"] for case in steps})
    ways = sorted({(case["collective"], case["codec"]) for case in steps if case["codec"] != "fp16"})
    cases: list[dict[str, Any]] = [{"kind": "codecs"}, {"kind": "collectives", "repeats": 3 if quick else 9}]
    cases += [_case("ring", "none", model, steps=3) for model in models]
    cases += [_case(*way, steps=5 if quick else 15) for way in ways]
    codecs, points, *found = _in_lab({"hosts": hosts, "rate": FREE}, cases)
    points["gather"] = without_codec(points["gather"], codecs["onebit"])
    machine: dict[str, Any] = {
        "collectives": {name: fit_cost(name, timed, hosts) for name, timed in points.items()},
        "codecs": codecs,
        "compute_s": {model: step["compute_s"] for model, step in zip(models, found, strict=False)},
    }
    # what a step takes beyond compute and the collective itself: the hook, its threads, waking up
    for way, step in zip(ways, found[len(models) :], strict=True):
        run = _run({"hosts": hosts, "rate": FREE}, _case(*way), step, machine) | {"compute_s": step["compute_s"]}
        beyond = step["seconds"] - predict_run(run | {"burst_byte": 0.0}, _cluster(machine))
        machine["collectives"][way[0]]["start_us"] = max(0.0, beyond * 1e6)
    return machine


def _run(
    network: dict[str, Any], case: dict[str, Any], found: dict[str, float], machine: dict[str, Any]
) -> dict[str, Any]:
    nodes = network.get("nodes", 1)
    rate = network.get("rate_between") or network["rate"]
    server = case["kind"] == "server"
    way = "parameter server" if server else f"{case['collective']} {case['codec']}"
    levels = f" {network['rate']} inside" if nodes > 1 else ""
    return {
        **case,
        "name": f"{case['model']}, {network['hosts']} hosts, {way}, {rate}{levels}",
        "world": network["hosts"] - 1 if server else network["hosts"],
        "hosts": network["hosts"],
        # each host has its own link to other nodes: as many adapters as ranks
        "ranks_per_node": network["hosts"] // nodes if nodes > 1 else 1,
        "adapters_per_node": network["hosts"] // nodes if nodes > 1 else 1,
        "rate_mbit_s": bits_per_second(rate) / 1e6,
        "inside_mbit_s": bits_per_second(network["rate"]) / 1e6 if nodes > 1 else 0,
        "burst_byte": max(131072.0, bits_per_second(rate) / 8 * 0.002),
        "compute_s": 0.0 if server else machine["compute_s"][case["model"]],
        "seconds": found["seconds"],
        "spread": found["spread"],
    }


def _cluster(machine: dict[str, Any]) -> Cluster:
    ring = machine["collectives"]["ring"]
    link = {"bandwidth_gbit_s": 1, "efficiency": PAYLOAD, "gap_us": 0, **ring}
    mapping = {
        "nodes": 1,
        "devices_per_node": 1,
        "jitter": 0.0,
        "device": {"memory_gib": 16, "memory_bandwidth_gbyte_s": 10, "sustained_tflop_s": 0.01},
        "inside": link,
        "between": dict(link),
        "collectives": machine["collectives"],
        "codecs": machine["codecs"],
    }
    return Cluster.from_mapping(mapping, "laboratory")


def validate_local(
    path: Path, *, measured: Path | None = None, quick: bool = False, tell: Any = None
) -> dict[str, Any]:
    """Measure (or read what was measured), predict, compare, and write all of it as JSON.

    Args:
        path: Where to write the result.
        measured: A file of an earlier call, to predict its runs again without measuring.
        quick: Five runs instead of 62.
        tell: Called with a line of text as the work goes on.

    Returns:
        The result; `bigstep.plan.render` prints it.
    """
    content = json.loads(measured.read_text()) if measured else measure(quick=quick, tell=tell)
    if not content.get("runs"):
        raise RunError("The laboratory measured no runs.")
    by_world: dict[str, list[dict[str, Any]]] = {}
    for run in content["runs"]:
        by_world.setdefault(str(run["hosts"]), []).append(run)
    rows = [
        row
        for hosts, runs in by_world.items()
        for row in compare_runs(runs, _cluster(content["machines"][hosts]))["rows"]
    ]
    errors = [abs(row["error"]) for row in rows if row["counts"]]
    result = {
        "kind": "local-validation",
        "rows": rows,
        "summary": {"runs": len(errors), "mean_error": sum(errors) / len(errors), "worst_error": max(errors)},
        "crossovers": [found for hosts, runs in by_world.items() for found in _crossovers(hosts, runs, content)],
        **{key: content[key] for key in ("machines", "runs", "seconds") if key in content},
    }
    write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
    return result


def _crossovers(hosts: str, runs: list[dict[str, Any]], content: dict[str, Any]) -> list[dict[str, Any]]:
    """Where 1-bit and the float32 ring cross, measured and predicted, for each model; None where they do not."""
    found = []
    for model in sorted({run["model"] for run in runs}):
        curves: dict[str, dict[float, tuple[float, float]]] = {"ring none": {}, "gather onebit": {}}
        for run in runs:
            key = f"{run.get('collective')} {run.get('codec')}"
            if run["model"] == model and key in curves and run["ranks_per_node"] == 1:
                predicted = predict_run(run, _cluster(content["machines"][hosts]))
                curves[key][run["rate_mbit_s"]] = run["seconds"], predicted
        rates = sorted(set(curves["ring none"]) & set(curves["gather onebit"]))
        if len(rates) < 2:
            continue
        plain, onebit = ([curves[key][rate] for rate in rates] for key in curves)
        crossings = [
            crossing_rate(rates, [row[side] for row in plain], [row[side] for row in onebit]) for side in (0, 1)
        ]
        found.append(
            {"hosts": int(hosts), "model": model, "measured_mbit_s": crossings[0], "predicted_mbit_s": crossings[1]}
        )
    return found
