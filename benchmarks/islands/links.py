"""Time to a target over links of known speed: synchronous exchanges beside islands, on four hosts of the laboratory.

    python benchmarks/islands/links.py [--rates 10mbit 100mbit] [--steps 40] [--out benchmarks/islands/results/links]

Needs root (network namespaces). The target is what DDP has in bits per byte after a number of steps. A method takes the
same path at any speed of the links, so its steps to the target are counted once, on links that hold nothing up, and the
seconds of a step are measured at each speed: over the second period of meetings, all methods in turn, in the same
processes. Links that hold nothing up come first: from these steps and the bytes of each method the planner names the
winner at every other speed before it is measured. Rates that were measured before stay in OUT.json; OUT.md is written
anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from planned import laboratory
from worker import DENSE, EVERY, METHODS

from bigstep.lab.hosts import Lab, why_no_lab
from bigstep.plan.cost import exchange_seconds
from bigstep.plan.islands import IslandPlan, predict_islands
from bigstep.tables.codecs import encoded_bytes

HERE = Path(__file__).parent
HOSTS = 4
FREE = "40gbit"
"""More than four processes on two cores can send."""
RATES = (FREE, "5mbit", "10mbit", "50mbit", "100mbit", "1gbit")
EVALUATE_EVERY = 10
PATIENCE = 3
"""How many times the steps of DDP a method may take to the target."""


def run(rate: str, job: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Do a job on hosts whose links have a rate."""
    with Lab(HOSTS, rate) as lab:
        seen: dict[str, list[dict[str, Any]]] = lab.run(HERE / "worker.py", json.dumps(job), timeout=900)[0]
    return seen


def follow_paths(steps: int, known: dict[str, Any]) -> dict[str, Any]:
    """Return the target, and by method the step that reaches it; None where none does. What is known stays."""
    curves = dict(known.get("curves", {})) if known.get("steps_of_ddp") == steps else {}
    most = {method: PATIENCE * steps for method in METHODS if not curves.get(method) or curves[method][-1][0] <= steps}
    if most:
        seen = run(FREE, {"steps": most, "rounds": 1, "evaluate_every": EVALUATE_EVERY})
        for method, each in seen.items():
            curves[method] = sorted((int(step), bits) for step, bits in each[0]["bits_per_byte"].items())
    target = dict(curves["DDP"])[steps]
    reached = {method: _crossing(curves[method], target) for method in METHODS}
    return {"steps_of_ddp": steps, "target": target, "reached": reached, "curves": curves}


def _crossing(curve: list[tuple[int, float]], target: float) -> float | None:
    """Return the step at which a curve first falls to the target, on a line between two evaluations."""
    before = None
    for step, bits in curve:
        if bits <= target:
            if before is None or bits == target:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - bits)
        before = step, bits
    return None


def measure(rate: str, rounds: int) -> dict[str, Any]:
    """Return the seconds and bytes of a step of every method: the mean of the last period of meetings.

    One period goes before, so that what travelled into the last stands for what travels out of it.
    """
    steps = dict.fromkeys(METHODS, max(DENSE, EVERY) + 1 + EVERY)
    seen = run(rate, {"steps": steps, "rounds": rounds, "evaluate_every": 0})
    found = {}
    for method, turns in seen.items():
        each = [statistics.mean(turn["seconds"][-EVERY:]) for turn in turns]
        sent = sum(turns[0]["bytes"][-EVERY:]) / EVERY
        found[method] = {"n": rounds, "median_s": statistics.median(each), "min_s": min(each), "bytes": sent}
    return found


def plan_winner(results: dict[str, Any], rate: str) -> str:
    """Name the method that reaches the target first at a rate: steps as counted, a step as the planner has it.

    What a step takes where links hold nothing up is measured; what links add is the planner's.
    """
    took = {}
    for method, steps in results["paths"]["reached"].items():
        if steps is None:
            continue
        free_s = results["rates"][FREE][method]["min_s"]
        workload, cluster = laboratory(free_s, rate)
        islands, exchange = METHODS[method].get("islands"), METHODS[method].get("exchange")
        if islands is not None:
            plan = IslandPlan(count=HOSTS, every=islands.every, fragments=islands.fragments, overlap=islands.overlap,
                              codec=islands.codec)  # fmt: skip
            step_s = predict_islands(workload, cluster, devices=HOSTS, local_batch=1, plan=plan).step_s
        else:
            sent = encoded_bytes(exchange.codec, workload.shapes)
            step_s = free_s + exchange_seconds(exchange.collective, sent, cluster, HOSTS)
        took[method] = steps * step_s
    return min(took, key=took.__getitem__)


def machine() -> dict[str, Any]:
    """Say where and with what this was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout
    return {
        "cores": os.cpu_count(), "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__, "commit": commit.strip(), "load": os.getloadavg()[0],
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """Write the table: seconds to the target, by method and rate, and how much sooner than DDP that is."""
    path, rates = results["paths"], [rate for rate in RATES if results["rates"].get(rate, {}).keys() >= METHODS.keys()]
    heads = ["unshaped" if rate == FREE else rate for rate in rates]
    lines = [
        f"# Time to {path['target']:.3f} bits per byte on four hosts",
        "",
        f"The loss that DDP reaches in {path['steps_of_ddp']} steps of 16 sequences of 64 bytes; a GPT of 120,000 "
        f"weights, AdamW, H = {EVERY}. Steps to the target × seconds of a step (the smaller of n rounds, all methods "
        "in turn); in brackets, how many times sooner than DDP.",
        "",
        f"| method | steps | kB a step | {' | '.join(heads)} |",
        "|---|--:|--:|" + "--:|" * len(rates),
    ]
    for method, steps in path["reached"].items():
        times = [results["rates"][rate] for rate in rates]
        took = [each[method]["min_s"] * (steps or math.nan) for each in times]
        ddp = [each["DDP"]["min_s"] * path["steps_of_ddp"] for each in times]
        cells = [f"{a:.1f} s ({b / a:.1f}×)" if steps else "not reached" for a, b in zip(took, ddp, strict=True)]
        sent = f"{times[0][method]['bytes'] / 1e3:.1f}" if times else ""
        lines.append(f"| {method} | {f'{steps:.0f}' if steps else '–'} | {sent} | {' | '.join(cells)} |")
    if FREE in results["rates"]:
        planned = [plan_winner(results, rate) for rate in rates]
        lines.append(f"| *planned to be first* | | | {' | '.join(planned)} |")
    where = results["machine"]
    n = min((each["n"] for rate in rates for each in results["rates"][rate].values()), default=0)
    lines += [
        "",
        f"n = {n}; {where['cores']} cores ({where['processor']}) shared by four hosts and other work (load "
        f"{where['load']:.0f}), torch {where['torch']}, commit {where['commit']}. What a step computes is in every "
        "figure, two cores for four hosts, and is most of it where links are fast.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Follow the paths unless they are known, then measure rate after rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", default=list(RATES), help="speeds of the links, as tc writes them; none "
                        "counts steps alone")  # fmt: skip
    parser.add_argument("--steps", type=int, default=40, help="of DDP, which set the target")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every method at each rate")
    parser.add_argument("--out", default=str(HERE / "results" / "links"), help="OUT.json and OUT.md are written")
    options = parser.parse_args()
    if reason := why_no_lab():
        sys.exit(f"Skipped: {reason}.")
    file = Path(f"{options.out}.json")
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rates": {}}
    results["machine"] = machine()
    results["paths"] = follow_paths(options.steps, results.get("paths", {}))
    file.write_text(json.dumps(results, indent=1) + "\n")
    for rate in options.rates:
        print(f"{rate} ...", flush=True)
        results["rates"][rate] = measure(rate, options.rounds)
        file.write_text(json.dumps(results, indent=1) + "\n")
        Path(f"{options.out}.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
