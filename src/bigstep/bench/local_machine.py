"""What this machine costs by itself: the constants of the local validation, on links that do not limit it.

All ranks share the machine's cores, so everything is measured with all of them at work at once.
"""

from __future__ import annotations

import json
from typing import Any

from bigstep.bench import lab_host
from bigstep.bench.lab import Lab, bits_per_second, burst_bytes
from bigstep.bench.local_grid import Network, case
from bigstep.bench.probe_links import fit_cost, without_codec
from bigstep.plan.cluster import Cluster
from bigstep.plan.local import predict_run

__all__ = ["PAYLOAD", "as_cluster", "describe_run", "layout", "measure_machine", "run_in_lab", "with_constants"]

FREE = "20gbit"
"""A rate that no rank of one machine reaches."""
UNLIMITED = {"rate_mbit_s": 1e6, "inside_mbit_s": 1e6, "burst_byte": 0.0, "inside_burst_byte": 0.0}
"""How that rate is predicted: what it lets through at once is more than any message."""
FREE_STEPS = {"mlp": 40, "resnet9": 20}
HALVES = ("fp16", "bf16")
PAYLOAD = 1448 / 1514
"""Share of an Ethernet frame that TCP with time stamps carries, as shapers count frames."""


def run_in_lab(network: dict[str, Any], cases: list[dict[str, Any]]) -> list[Any]:
    """What the first host of a laboratory says of each case."""
    with Lab(**network) as lab:
        answers: list[list[Any]] = lab.run(lab_host.__file__, json.dumps(cases), timeout=300)
    return answers[0]


def layout(network: dict[str, Any]) -> str:
    """The world of a network, without its rates: hosts x nodes."""
    return f"{network['hosts']}x{network.get('nodes', 1)}"


def measure_machine(name: str, networks: list[Network], quick: bool) -> dict[str, Any]:
    """Costs of collectives, codecs and models in one world, and one step of each model and method, unlimited.

    Args:
        name: Of the world, as `layout` gives it.
        networks: Of the grid; those of this world say which models and methods are needed.
        quick: Fewer repetitions.

    Returns:
        `collectives` and `codecs` as a cluster file has them, `workloads` as a workload file has them, and `own_s`: the
        seconds of a step that are not the network's, by model and method. `own_s` is what makes the prediction for
        unlimited links equal the step measured there; it covers compute, hooks, threads and whatever of the codec and
        of the copying competes with compute for the cores.
    """
    mine = [(network, cases) for network, cases in networks if layout(network) == name]
    wanted = {_method(each): each for _, cases in mine for each in cases if each["codec"] not in HALVES}
    models = sorted({each["model"] for each in wanted.values() if each["kind"] == "sync"})
    probes: list[dict[str, Any]] = [{"kind": "codecs"}, {"kind": "collectives", "repeats": 3 if quick else 9}]
    probes += [{**case("ring", "none", model), "kind": "workload"} for model in models]
    probes += [{**each, "steps": 5 if quick else FREE_STEPS.get(each["model"], 15)} for each in wanted.values()]
    free = {"hosts": mine[0][0]["hosts"], "rate": FREE}
    if mine[0][0].get("nodes", 1) > 1:
        free |= {"nodes": mine[0][0]["nodes"], "rate_between": FREE}
    codecs, points, *found = run_in_lab(free, probes)
    points["gather"] = without_codec(points["gather"], codecs["onebit"])
    machine: dict[str, Any] = {
        "collectives": {name: fit_cost(name, timed, free["hosts"]) for name, timed in points.items()},
        "codecs": codecs,
        "workloads": dict(zip(models, found, strict=False)),
        "free_s": {key: step["seconds"] for key, step in zip(wanted, found[len(models) :], strict=True)},
        "own_s": {},
    }
    for key, each in wanted.items():
        seconds = machine["free_s"][key]
        run = with_constants(describe_run(free, each, seconds) | UNLIMITED, machine)
        machine["own_s"][key] = _own_seconds(run, as_cluster(machine), seconds)
    return machine


def _method(each: dict[str, Any]) -> str:
    """What a rank's own time depends on; half precision has it from float32, and its casts from the codec's speed."""
    codec = "none" if each["codec"] in HALVES else each["codec"]
    return f"{each['model']} {each.get('collective', 'server')} {codec}"


def _own_seconds(run: dict[str, Any], machine: Cluster, seconds: float) -> float:
    """The rank's own time at which a run is predicted to take `seconds`; the prediction grows with it."""
    low, high = 0.0, seconds
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if predict_run(run | {"compute_s": middle}, machine) < seconds else (low, middle)
    return high


def describe_run(network: dict[str, Any], each: dict[str, Any], seconds: float, spread: float = 0.0) -> dict[str, Any]:
    """A run as `bigstep.plan.local` reads it, still without the machine's constants."""
    nodes = network.get("nodes", 1)
    rate = network.get("rate_between") or network["rate"]
    server = each["kind"] == "server"
    way = "parameter server" if server else f"{each['collective']} {each['codec']}"
    levels = f" {network['rate']} inside" if nodes > 1 else ""
    return {
        **each,
        "name": f"{each['model']}, {network['hosts']} hosts, {way}, {rate}{levels}",
        "world": network["hosts"] - 1 if server else network["hosts"],
        "layout": layout(network),
        # each host has its own link to other nodes: as many adapters as ranks
        "ranks_per_node": network["hosts"] // nodes if nodes > 1 else 1,
        "adapters_per_node": network["hosts"] // nodes if nodes > 1 else 1,
        "rate_mbit_s": bits_per_second(rate) / 1e6,
        "inside_mbit_s": bits_per_second(network["rate"]) / 1e6 if nodes > 1 else 0,
        "burst_byte": burst_bytes(rate),
        "inside_burst_byte": burst_bytes(network["rate"]),
        "seconds": seconds,
        "spread": spread,
    }


def with_constants(run: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """The run with the layers of its model and the rank's own time, as measured on this machine."""
    layers = machine["workloads"].get(run["model"]) if run["kind"] == "sync" else None
    return run | {"workload": layers, "compute_s": machine["own_s"].get(_method(run), 0.0)}


def as_cluster(machine: dict[str, Any]) -> Cluster:
    """The machine as the planner reads one; runs bring the rates of their links."""
    link = {"bandwidth_gbit_s": 1, "efficiency": PAYLOAD, "gap_us": 0, **machine["collectives"]["ring"]}
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
