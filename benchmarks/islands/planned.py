"""Real runs on islands over shaped links beside the planner's predictions: four hosts, a method and an H each.

    python benchmarks/islands/planned.py [--minutes 8] [--out benchmarks/islands/results/planned]

Needs root (network namespaces). Runs at 1 Gbit/s, a speed that no compared run has, set the constants: the step of an
island, which is the same however islands meet, and for each method what a round of meetings costs in software where
four hosts share two cores, beside what is on the wire.
Every turn takes all cases in an order of its own, so that what drifts on the machine falls on all alike; a case is
judged by the median of its periods. Turns that were taken before stay in OUT.json, so that the series may be broken
off; OUT.md is written anew.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from worker import network

from bigstep.lab.hosts import Lab, bits_per_second, burst_bytes, why_no_lab
from bigstep.lab.machine import PAYLOAD
from bigstep.plan.cluster import Cluster
from bigstep.plan.islands import IslandPlan, fewest_steps_between, predict_islands
from bigstep.plan.workload import Layer, Workload
from bigstep.records import describe_machine

HERE = Path(__file__).parent
HOSTS = 4
KNOWN = "1gbit"
RATES = ("10mbit", "20mbit", "50mbit", "100mbit", "200mbit")
METHODS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "averaging": ({}, (2, 5, 10, 20)),
    "bf16": ({"codec": "bf16"}, (4, 12)),
    "int8": ({"codec": "int8"}, (3, 12)),
    "int4": ({"codec": "int4"}, (2, 8)),
    "two steps on the way": ({"overlap": 2}, (5, 15)),
    "two fragments, int4, two steps on the way": ({"codec": "int4", "fragments": 2, "overlap": 2}, (10,)),
}
"""By name, the settings, and the values of H over shaped links: 13 at each of five rates."""
KNOWN_EVERY = (4, 16)
"""The values of H at 1 Gbit/s; two meet another H than any compared run."""


def cases() -> list[dict[str, Any]]:
    """Return what a turn measures."""
    found = []
    for name, (settings, values) in METHODS.items():
        for rate in (KNOWN, *RATES):
            for every in KNOWN_EVERY if rate == KNOWN else values:
                islands = {"count": HOSTS, "every": every, **settings}
                periods = max(4, (32 if rate == KNOWN else 8) // every)
                found.append({"method": name, "rate": rate, "islands": islands, "periods": periods})
    return found


def name_of(case: dict[str, Any]) -> str:
    """Name a case for the results."""
    return f"{case['method']}, H = {case['islands']['every']}, {case['rate']}"


def take_turn(number: int) -> dict[str, list[float]]:
    """Measure all cases once; return the seconds of their periods by name."""
    order = cases()
    random.Random(number).shuffle(order)
    with Lab(HOSTS, KNOWN) as lab, tempfile.NamedTemporaryFile("w", suffix=".json") as job:
        json.dump([{**case, "commands": lab.commands_for(case["rate"])} for case in order], job)
        job.flush()
        seen: list[list[float]] = lab.run(HERE / "planned_worker.py", job.name, timeout=590)[0]
    return {name_of(case): periods for case, periods in zip(order, seen, strict=True)}


def measured(turns: list[dict[str, list[float]]], case: dict[str, Any]) -> float:
    """Return the seconds of a step of a case: the median of its periods, divided by H."""
    return statistics.median(each for turn in turns for each in turn[name_of(case)]) / float(case["islands"]["every"])


def constants(turns: list[dict[str, list[float]]]) -> dict[str, tuple[float, float]]:
    """Return by method the step of an island, and what a round of meetings takes beyond it and the wire."""
    few, many = KNOWN_EVERY
    known = {(case["method"], case["islands"]["every"]): case for case in cases() if case["rate"] == KNOWN}
    took = {key: measured(turns, case) * case["islands"]["every"] for key, case in known.items()}
    step = statistics.mean((took[method, many] - took[method, few]) / (many - few) for method in METHODS)

    def beyond(method: str, every: int) -> float:
        return took[method, every] - predicted(known[method, every], step, 0.0) * every

    return {
        method: (step, max(0.0, statistics.mean(beyond(method, every) for every in KNOWN_EVERY))) for method in METHODS
    }


def laboratory(step_s: float, rate: str, start_s: float = 0.0) -> tuple[Workload, Cluster]:
    """Return the model with the step that was measured, and hosts with links of a rate; `start_s` begins a meeting."""
    shapes = tuple(tuple(parameter.shape) for parameter in network().parameters())
    layer = Layer(name="all", shapes=shapes, flops=1.0, forward_s=step_s / 3, backward_s=step_s * 2 / 3)
    workload = Workload(name="tiny", layers=(layer,), measured_batch=1, optimizer_s=1e-9)
    link = {"bandwidth_gbit_s": bits_per_second(rate) / 1e9, "efficiency": PAYLOAD, "latency_us": 1, "gap_us": 0}
    link |= {"start_us": start_s * 1e6}
    device = {"memory_gib": 16, "memory_bandwidth_gbyte_s": 10, "sustained_tflop_s": 0.01}
    return workload, Cluster.from_mapping(
        {"nodes": HOSTS, "devices_per_node": 1, "jitter": 0.0, "device": device, "inside": link, "between": dict(link)},
        "laboratory",
    )


def predicted(case: dict[str, Any], step_s: float, software_s: float) -> float:
    """Predict the seconds of a step from the constants of its method and the rate of its links.

    What a shaper lets through at once after a pause saves each meeting so much of the wire: no more than the meeting
    takes, and no more than the shaper could save up while nothing was sent; over a whole period it keeps to its rate.
    """
    workload, cluster = laboratory(step_s, case["rate"])
    plan = IslandPlan(**case["islands"])
    found = predict_islands(workload, cluster, devices=HOSTS, local_batch=1, plan=plan)
    burst_s = burst_bytes(case["rate"]) * 8 / bits_per_second(case["rate"])
    rounds_s = [found.meeting_s, found.exposed_s * plan.every, step_s * plan.every]
    saved = min(burst_s, *(each / plan.fragments for each in rounds_s))
    step_s = found.step_s - saved * plan.fragments / plan.every + software_s / plan.every
    return max(step_s, found.meeting_s / plan.every)


def compare(turns: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Set predictions beside measurements, and the H that is proposed beside the one that the measurement asks for."""
    known = constants(turns)
    rows = []
    for case in cases():
        if case["rate"] == KNOWN:
            continue
        seen, said = measured(turns, case), predicted(case, *known[case["method"]])
        rows.append(
            {"name": name_of(case), "measured_ms": seen * 1e3, "predicted_ms": said * 1e3, "error": said / seen - 1}
        )
    errors = [abs(row["error"]) for row in rows]
    summary = {"runs": len(rows), "mean_error": statistics.mean(errors), "worst_error": max(errors)}
    return {"constants": known, "rows": rows, "summary": summary, "proposed": [propose(turns, rate) for rate in RATES]}


def propose(turns: list[dict[str, list[float]]], rate: str) -> dict[str, Any]:
    """Return the smallest H whose meetings take a tenth of the time, as planned and as the longest H measured says."""
    step_s, software_s = constants(turns)["averaging"]
    workload, cluster = laboratory(step_s, rate, software_s)
    plan = IslandPlan(count=HOSTS)
    found = fewest_steps_between(workload, cluster, devices=HOSTS, local_batch=1, plan=plan)
    longest = max((case for case in cases() if case["method"] == "averaging" and case["rate"] == rate),
                  key=lambda case: int(case["islands"]["every"]))  # fmt: skip
    every = longest["islands"]["every"]
    meeting_s = measured(turns, longest) * every - every * step_s
    return {"rate": rate, "planned": found.plan.every, "measured": meeting_s * 0.9 / (0.1 * step_s)}


def markdown(results: dict[str, Any]) -> str:
    """Write the table."""
    found, machine = results["compared"], results["machine"]
    summary = found["summary"]
    lines = [
        "# Islands over shaped links beside the planner", "",
        f"{summary['runs']} runs of four hosts: mean absolute error **{summary['mean_error']:.1%}**, worst "
        f"**{summary['worst_error']:.1%}**. A GPT of 120,000 weights; n = {len(results['turns'])} turns, medians of "
        f"the periods of meetings; {machine['hardware']['processor']}, {machine['hardware']['cores']} "
        f"cores shared by four hosts, torch {machine['versions']['torch']}, commit {machine['commit']}. Constants come "
        f"from runs at {KNOWN}: a step takes "
        f"{found['constants']['averaging'][0] * 1e3:.1f} ms, and software of a round of meetings", "",
        "| method | meetings |", "|---|--:|",
        *(f"| {name} | {more * 1e3:.1f} ms |" for name, (_, more) in found["constants"].items()),
        "", "| method, H, links | measured | predicted | error |", "|---|--:|--:|--:|",
        *(f"| {row['name']} | {row['measured_ms']:.1f} ms | {row['predicted_ms']:.1f} ms | {row['error']:+.1%} |"
          for row in found["rows"]),
        "", "The smallest H whose meetings take a tenth of the time, plain averaging:", "",
        "| links | planned | as measured |", "|---|--:|--:|",
        *(f"| {row['rate']} | {row['planned']} | {row['measured']:.0f} |" for row in found["proposed"]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Take turns until the time is up, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="begin no turn that would not end within so long")
    parser.add_argument("--out", default=str(HERE / "results" / "planned"))
    options = parser.parse_args()
    if reason := why_no_lab():
        sys.exit(f"Skipped: {reason}.")
    file, begun, longest = Path(f"{options.out}.json"), time.monotonic(), 0.0
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"turns": []}
    while time.monotonic() - begun + longest < 60 * options.minutes:
        started = time.monotonic()
        results["turns"].append(take_turn(len(results["turns"])))
        longest = max(longest, time.monotonic() - started)
        results |= {"machine": describe_machine(), "compared": compare(results["turns"])}
        file.write_text(json.dumps(results, indent=1) + "\n")
        Path(f"{options.out}.md").write_text(markdown(results))
        print(f"turn {len(results['turns'])}: {longest:.0f} s, {results['compared']['summary']}", flush=True)
    if results["turns"]:
        results["compared"] = compare(results["turns"])
        file.write_text(json.dumps(results, indent=1) + "\n")
        Path(f"{options.out}.md").write_text(markdown(results))


if __name__ == "__main__":
    main()
