"""Tuned buckets (`bucket_mb: auto`) against DDP's default of 25 MB, on shaped links of the network laboratory.

    python benchmarks/exchange/buckets.py [--quick] [--out benchmarks/exchange/results/buckets]

Needs root (network namespaces); about three minutes. In every repeat the tuner chooses anew; then steps with the size
it chose, with 25 MB, with 25 MB once more (what noise does to a ratio of 1) and with DDP as it comes are taken in
turns.
Goal: tuned / default <= 1 up to the noise that the second default shows. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bigstep.lab.hosts import Lab, why_no_lab
from bigstep.records import describe_machine

HERE = Path(__file__).parent
HOSTS = 4
CASES = [  # model, rate: what is sent dominates, weighs as much as computing, or is small
    {"model": "mlp", "widths": [1024] * 5, "rate": "1gbit"},
    {"model": "resnet18", "rate": "3gbit"},
    {"model": "small", "rate": "100mbit"},
]
DEFAULT, AGAIN, TUNED, ALONE = "25 MB", "25 MB again", "tuned", "DDP alone"


def measure(case: dict[str, Any], repeats: int, steps: int) -> dict[str, Any]:
    job = {"kind": "buckets", **case, "repeats": repeats, "steps": steps}
    with Lab(HOSTS, case["rate"]) as lab:
        rounds: list[dict[str, Any]] = lab.run(HERE / "worker.py", json.dumps(job), timeout=600)[0]
    for one in rounds:
        base = one["seconds"][DEFAULT]
        one["against_default"] = {
            name: statistics.median(a / b for a, b in zip(seconds, base, strict=True))
            for name, seconds in one["seconds"].items()
        }
    return {
        **{key: value for key, value in case.items() if key != "widths"}, "hosts": HOSTS, "rounds": rounds,
        "tuned_over_default": [one["against_default"][TUNED] for one in rounds],
        "default_over_default": [one["against_default"][AGAIN] for one in rounds],
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# Tuned buckets against DDP's default",
        "",
        "Written by `python benchmarks/exchange/buckets.py`: seconds a step of the slowest of 4 hosts, medians; ratios "
        "are medians over neighbouring steps of one run. The default stands beside a second copy of itself: what that "
        "differs from 1 is noise.",
        "",
        f"- hardware: {machine['hardware']}",
        f"- versions: {machine['versions']}",
        f"- commit: {machine['commit']}",
        "",
        "| model, rate | n | chosen | default s | tuned s | tuned/default | default/default | DDP alone/default |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        for one in case["rounds"]:
            medians = {name: statistics.median(seconds) for name, seconds in one["seconds"].items()}
            ratio = one["against_default"]
            lines.append(
                f"| {case['model']}, {case['rate']} | {len(one['seconds'][DEFAULT])} | {one['chosen']:g} MB | "
                f"{medians[DEFAULT]:.4f} | {medians[TUNED]:.4f} | {ratio[TUNED]:.3f} | {ratio[AGAIN]:.3f} | "
                f"{ratio[ALONE]:.3f} |"
            )
    lines += ["", "Sizes tried (median seconds a step, by repeat):", ""]
    for case in result["cases"]:
        for number, one in enumerate(case["rounds"], 1):
            tried = ", ".join(f"{row['bucket_mb']:g} MB {row['median_s']:.4f}" for row in one["table"])
            lines.append(f"- {case['model']}, {case['rate']}, {number}: {tried}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, few steps: does everything run?")
    parser.add_argument("--out", default=str(HERE / "results" / "buckets"), help="OUT.json and OUT.md are written")
    options = parser.parse_args()
    if reason := why_no_lab():
        sys.exit(f"Skipped: {reason}.")
    repeats, steps = (1, 3) if options.quick else (3, 8)
    result: dict[str, Any] = {"machine": describe_machine(), "cases": []}
    for case in CASES:
        print(f"{case['model']}, {case['rate']} ...", flush=True)
        result["cases"].append(measure(case, repeats, steps))
        Path(f"{options.out}.json").write_text(json.dumps(result, indent=1) + "\n")
        Path(f"{options.out}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
