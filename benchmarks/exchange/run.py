"""What each exchange is worth on links of known speed: the laboratory benchmark.

    python benchmarks/exchange/run.py [--quick] [--out benchmarks/exchange/results]

Needs root (network namespaces). Variants of a case run in turns inside one run, so ratios compare like with like;
every figure has n, median and spread. Writes OUT.json and OUT.md.
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

from bigstep.lab.hosts import Lab, bits_per_second, why_no_lab
from bigstep.tables.codecs import encoded_bytes
from bigstep.tables.collectives import collective_traffic

HERE = Path(__file__).parent
REPEATS = 5

ONEBIT = {"collective": "gather", "codec": "onebit"}
STEP_VARIANTS: dict[str, Any] = {
    "DDP fp32": None,
    "ring fp32": {"collective": "ring"},
    "ring fp16": {"collective": "ring", "codec": "fp16"},
    "powersgd rank 2": {"codec": "powersgd", "rank": 2},
    "1-bit": ONEBIT,
    "1-bit, double buffer": {**ONEBIT, "double_buffer": True},
}


def summary(seconds: list[float]) -> dict[str, float]:
    return {
        "n": len(seconds), "median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds),
    }  # fmt: skip


def ratios(slow: list[float], fast: list[float]) -> dict[str, float]:
    """Of neighbouring repeats in the same run."""
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    return {"n": len(each), "median": statistics.median(each), "min": min(each), "max": max(each)}


def run(lab: Lab, job: dict[str, Any], timeout: float = 600) -> dict[str, Any]:
    with lab:
        result: dict[str, Any] = lab.run(HERE / "worker.py", json.dumps(job), timeout=timeout)[0]
    return result


def ring_efficiency(quick: bool) -> dict[str, Any]:
    """Case 1: the share of the bandwidth bound that a ring reaches, by size."""
    rate, hosts = "100mbit", 4
    sizes = [1_000_000, 4_000_000] if quick else [250_000, 1_000_000, 4_000_000, 16_000_000]
    times = run(Lab(hosts, rate), {"kind": "sum", "collectives": ["ring"], "nbytes": sizes, "repeats": REPEATS})
    rows = {}
    for nbytes in sizes:
        bound = 8 * collective_traffic("ring", nbytes, hosts).bytes_sent / bits_per_second(rate)
        seconds = times[f"ring {nbytes}"]
        rows[f"{nbytes / 1e6:g} MB"] = {
            **summary(seconds),
            "bound_s": bound,
            "of_bound": bound / statistics.median(seconds),
        }
    return {"hosts": hosts, "rate": rate, "goal": ">= 0.90 of the bound from 4 MB", "rows": rows}


def two_levels(quick: bool, uplink: str) -> dict[str, Any]:
    """Case 2: 2 nodes x 4 ranks, 10:1 links."""
    nbytes = 2_000_000 if quick else 8_000_000
    lab = Lab(8, "1gbit", nodes=2, rate_between="100mbit", uplink=uplink)  # type: ignore[arg-type]
    names = ["ring", "torus", "hierarchical", "halving"]
    times = run(lab, {"kind": "sum", "collectives": names, "nbytes": [nbytes], "repeats": REPEATS})
    seconds = {name: times[f"{name} {nbytes}"] for name in names}
    rows = {name: {**summary(mine), "ring_over_this": ratios(seconds["ring"], mine)} for name, mine in seconds.items()}
    goal = "torus >= 3 x ring" if uplink == "own" else "reported as it is"
    return {"hosts": "2 nodes x 4", "rate": "1gbit inside, 100mbit between", "uplink": uplink, "nbytes": nbytes,
            "goal": goal, "rows": rows}  # fmt: skip


def training_step(quick: bool, rate: str, names: list[str], repeats: int = REPEATS) -> dict[str, Any]:
    """Cases 3 and 4: time of a training step of a communication-bound model (two square layers, a batch of 4)."""
    width = 1024 if quick else 2048
    job = {
        "kind": "step", "variants": {name: STEP_VARIANTS[name] for name in names}, "repeats": repeats,
        "width": width, "layers": 2, "batch": 4, "bucket_mb": 4, "warm": 3,
    }  # fmt: skip
    times = run(Lab(4, rate), job)
    rows = {
        name: {**summary(times[name]), "ddp_over_this": ratios(times["DDP fp32"], times[name])} for name in names
    }  # fmt: skip
    shapes = [(width, width)] * 2
    return {"hosts": 4, "rate": rate, "values": 2 * width * width, "rows": rows,
            "onebit_ratio_on_the_wire": encoded_bytes("none", shapes) / encoded_bytes("onebit", shapes)}  # fmt: skip


def crossover(quick: bool) -> dict[str, Any]:
    """Case 4: the rate above which 1-bit no longer beats DDP, by interpolation of log(ratio) over log(rate)."""
    rates = ["100mbit", "1gbit"] if quick else ["100mbit", "300mbit", "1gbit", "3gbit", "10gbit", "30gbit"]
    cases = {rate: training_step(quick, rate, ["DDP fp32", "1-bit"]) for rate in rates}
    points = [(bits_per_second(rate), case["rows"]["1-bit"]["ddp_over_this"]["median"]) for rate, case in cases.items()]
    crossing: float | None = None
    for (low, above), (high, below) in zip(points, points[1:], strict=False):
        if above >= 1 > below:
            share = math.log(above) / (math.log(above) - math.log(below))
            crossing = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return {"cases": cases, "points": points, "stops_paying_at_bit_per_s": crossing}


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "processor": model, "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(),
        "torch": torch.__version__, "commit": commit, "load_average_at_start": os.getloadavg()[0],
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Exchange benchmark",
        "",
        "Written by `python benchmarks/exchange/run.py`; seconds are of the slowest rank.",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in results["machine"].items()]
    for title, case in results["cases"].items():
        parts = case["cases"].items() if "cases" in case else [("", case)]
        lines += ["", f"## {title}", ""]
        if "stops_paying_at_bit_per_s" in case:
            found = case["stops_paying_at_bit_per_s"]
            lines += [
                f"1-bit stops paying at {found / 1e9:.2f} Gbit/s." if found else "No crossing in the rates tried.",
                "",
            ]
        if "goal" in case:
            lines += [f"Goal: {case['goal']}.", ""]
        lines += ["| variant | n | median s | min-max s | against |", "|---|---|---|---|---|"]
        for label, part in parts:
            for name, row in part["rows"].items():
                ratio = row.get("ring_over_this") or row.get("ddp_over_this")
                against = (
                    f"{ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f})" if ratio
                    else f"{row['of_bound']:.1%} of the bound"
                )  # fmt: skip
                spread = f"{row['min_s']:.4f}-{row['max_s']:.4f}"
                lines.append(f"| {label} {name} | {row['n']} | {row['median_s']:.4f} | {spread} | {against} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: does everything run?")
    parser.add_argument("--out", default=str(HERE / "results"), help="OUT.json and OUT.md are written")
    parser.add_argument("--only", default="", help="part of a case's title")
    options = parser.parse_args()
    if reason := why_no_lab():
        sys.exit(f"Skipped: {reason}.")
    cases = {
        "Ring, 4 hosts at 100 Mbit/s": lambda: ring_efficiency(options.quick),
        "Two levels, an uplink for each rank": lambda: two_levels(options.quick, "own"),
        "Two levels, one uplink for each node": lambda: two_levels(options.quick, "shared"),
        "Training step, 4 hosts at 100 Mbit/s (goal: 1-bit >= 15x DDP)": lambda: training_step(
            options.quick, "100mbit", list(STEP_VARIANTS)
        ),
        "Bandwidth above which 1-bit stops paying": lambda: crossover(options.quick),
    }
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    for title, case in cases.items():
        if options.only in title:
            print(f"{title} ...", flush=True)
            results["cases"][title] = case()
            Path(f"{options.out}.json").write_text(json.dumps(results, indent=1) + "\n")
            Path(f"{options.out}.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
