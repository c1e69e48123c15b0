"""What the machine itself costs: the constants of the local validation, on links that do not limit it.

All ranks share the machine's cores, so everything is measured while all of them work at once.
"""

from __future__ import annotations

import json
import os
import statistics
from typing import Any

from bigstep.lab import measure_on_host
from bigstep.lab.cases import Network
from bigstep.lab.hosts import Lab, bits_per_second, burst_bytes
from bigstep.lab.probe_links import fit_cost, without_codec
from bigstep.plan.cluster import Cluster
from bigstep.plan.local import encoding_s, last_exchange_s

__all__ = ["PAYLOAD", "as_cluster", "describe_run", "layout", "measure_world", "own_times", "relief", "with_constants"]

FREE = "20gbit"
"""A rate that no rank of one machine reaches."""
UNLIMITED = {"rate_mbit_s": 1e6, "inside_mbit_s": 1e6, "burst_byte": 0.0, "inside_burst_byte": 0.0}
"""How predictions treat that rate, whose burst is larger than any message: as no limit."""
HALVES = ("fp16", "bf16")
PAYLOAD = 1448 / 1514
"""Share of an Ethernet frame that TCP with time stamps carries, as shapers count frames."""
TURNS = 9
"""How often all runs of a world are repeated, in turns."""
FREE_STEPS = 8
"""Steps of each turn on unlimited links: more than at any other speed, since all predictions rest on them."""


def layout(network: dict[str, Any]) -> str:
    """The world of a network, without its rates: hosts x nodes."""
    return f"{network['hosts']}x{network.get('nodes', 1)}"


def measure_world(networks: list[Network], quick: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure the machine and all runs of the networks of one world.

    One laboratory serves all of them. First come the costs of collectives, codecs and models on links that limit
    nothing. Then all runs take turns, one link speed after another; the same steps on unlimited links take turns too.

    Args:
        networks: Of one world, hence with the same hosts and nodes.
        quick: One turn.

    Returns:
        The machine, and the runs as `describe_run` has them. The machine has `collectives` and `codecs` as a cluster
        file has them, `workloads` as a workload file has them, and in `free` the steps on unlimited links, by model
        and method.
    """
    free = {"hosts": networks[0][0]["hosts"], "rate": FREE}
    if networks[0][0].get("nodes", 1) > 1:
        free |= {"nodes": networks[0][0]["nodes"], "rate_between": FREE}
    wanted = {_method(each): each for _, cases in networks for each in cases if each["codec"] not in HALVES}
    models = {_model(each): each for each in wanted.values() if each["kind"] == "sync"}
    probes: list[dict[str, Any]] = [{"kind": "codecs"}, {"kind": "collectives", "repeats": 3 if quick else 15}]
    probes += [{**each, "kind": "workload", "steps": 5 if quick else 15} for each in models.values()]
    unlimited = [
        each | {"steps": each["steps"] if quick else max(FREE_STEPS, each["steps"])} for each in wanted.values()
    ]
    turns = [(free, unlimited), *networks]
    with Lab(**free) as lab:
        groups = [
            [{"kind": "links", "commands": lab.commands_for(net["rate"], net.get("rate_between", ""))}, *cases]
            for net, cases in turns
        ]
        probes.append({"kind": "turns", "groups": groups, "count": 1 if quick else TURNS})
        answers = lab.run(measure_on_host.__file__, json.dumps(probes), timeout=1800)
    codecs, points, *workloads, steps = answers[0]
    points["gather"] = without_codec(points["gather"], codecs["onebit"])
    machine: dict[str, Any] = {
        "cores": os.cpu_count() or 1,
        "ranks": free["hosts"],
        "collectives": {name: fit_cost(name, timed, free["hosts"]) for name, timed in points.items()},
        "codecs": codecs,
        "workloads": dict(zip(models, workloads, strict=True)),
        "free": {
            key: describe_run(free, each, found) | UNLIMITED | {"exposed_s": quartiles([s[-1] for s in found])[0]}
            for (key, each), found in zip(wanted.items(), steps[0][1:], strict=True)
        },
    }
    runs = [
        describe_run(network, each, its_steps)
        for (network, cases), (_, *found) in zip(networks, steps[1:], strict=True)
        for each, its_steps in zip(cases, found, strict=True)
    ]
    return machine, runs


def _model(each: dict[str, Any]) -> str:
    """The key of what the layers' times depend on."""
    return f"{each['model']}, {each['bucket_mb']:g} MB"


def _method(each: dict[str, Any]) -> str:
    """The key of what a rank's own time depends on; half precision takes float32's, plus casts at the codec's speed."""
    if each["kind"] == "server":
        return f"{each['model']}, server"
    return f"{_model(each)}, {each['collective']} {'none' if each['codec'] in HALVES else each['codec']}"


def own_times(machine: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What a step takes apart from the network, by model and method, from the steps on unlimited links.

    Until the last gradient, `free_s - exposed_s - after - encoding`: the measured layers, and the part of the exchange
    that competed with them for the cores. Encoding is predicted separately; `after` is what followed the last gradient
    when every bucket was returned at once. After the last exchange, `after` plus what that exchange took beyond its
    prediction: its codec and its threads wait for cores too.

    Returns:
        `compute_s` (all of it), `after_s` (what follows the last exchange), `free_s` (the step on unlimited links).
    """
    cluster, found = as_cluster(machine), {}
    for key, run in machine["free"].items():
        found[key] = {"free_s": run["seconds"], "compute_s": 0.0}
        if run["kind"] == "sync":
            given = with_constants(run, machine, {})
            after = given["workload"]["optimizer_us"] / 1e6
            beyond = max(0.0, run["exposed_s"] * relief(machine) - last_exchange_s(given, cluster))
            own = max(0.0, run["seconds"] - run["exposed_s"] - encoding_s(given, cluster)) + beyond
            found[key] |= {"compute_s": own, "after_s": after + beyond}
    return found


def relief(machine: dict[str, Any]) -> float:
    """Factor on the exchange's software cost where links are the bottleneck: cores / ranks, at most 1.

    That cost was measured while all ranks needed the cores. Ranks that wait for bytes leave the cores to the others.
    """
    return min(1.0, float(machine["cores"]) / float(machine["ranks"]))


def quartiles(values: list[float]) -> list[float]:
    """The three quartiles; a run is judged by the first: other programs and TCP's probing only lengthen steps."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def describe_run(network: dict[str, Any], each: dict[str, Any], steps: list[list[float]]) -> dict[str, Any]:
    """A run as `bigstep.plan.local` reads it, still without the machine's constants; `steps` as a host returns them."""
    times = [step[0] for step in steps]
    first, median, third = quartiles(times)
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
        # each host has its own link to other nodes, so there are as many adapters as ranks
        "ranks_per_node": network["hosts"] // nodes if nodes > 1 else 1,
        "adapters_per_node": network["hosts"] // nodes if nodes > 1 else 1,
        "rate_mbit_s": bits_per_second(rate) / 1e6,
        "inside_mbit_s": bits_per_second(network["rate"]) / 1e6 if nodes > 1 else 0,
        "burst_byte": burst_bytes(rate),
        "inside_burst_byte": burst_bytes(network["rate"]),
        "seconds": first,
        "spread": third - first,
        "median_s": median,
        "timed": len(times),
    }


def with_constants(run: dict[str, Any], machine: dict[str, Any], own: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The run with the layers of its model and the rank's own times (`own_times`), as measured on this machine."""
    layers = machine["workloads"].get(_model(run)) if run["kind"] == "sync" else None
    return run | {"workload": layers} | own.get(_method(run), {"compute_s": 0.0})


def as_cluster(machine: dict[str, Any]) -> Cluster:
    """The machine as the planner reads one; each run supplies the rates of its links."""
    collectives = {
        name: cost | {"latency_us": cost["latency_us"] * relief(machine)}
        for name, cost in machine["collectives"].items()
    }
    link = {"bandwidth_gbit_s": 1, "efficiency": PAYLOAD, "gap_us": 0, **collectives["ring"]}
    mapping = {
        "nodes": 1,
        "devices_per_node": 1,
        "jitter": 0.0,
        "device": {"memory_gib": 16, "memory_bandwidth_gbyte_s": 10, "sustained_tflop_s": 0.01},
        "inside": link,
        "between": dict(link),
        "collectives": collectives,
        "codecs": machine["codecs"],
    }
    return Cluster.from_mapping(mapping, "laboratory")
