"""Accuracy of the asynchronous methods beside the synchronous run in the same samples, over seeds.

    python benchmarks/downpour/accuracy.py [--seeds 3] [--epochs 10] [--out FOLDER]

Downpour (2 shards, 3 replicas) beside the same configuration run synchronously; Hogwild! beside locked, which is the
serial run. Differences are in points of top-1 accuracy on the embedded data's test set. Writes accuracy.json and
accuracy.md; ends with status 1 if Downpour stays more than 1.5 points behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bigstep import recipes
from bigstep.asynchronous import train_downpour, train_hogwild, train_locked
from bigstep.config import AsynchronousConfig, RunConfig
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.records import describe_machine
from bigstep.train import fit

GOAL = 1.5  # points


def synchronous(config: RunConfig, **arguments: Any) -> Any:
    return fit(dataclasses.replace(config, asynchronous=AsynchronousConfig()), **arguments)


PAIRS = {
    "downpour": (train_downpour, synchronous, "synchronous"),
    "hogwild": (train_hogwild, train_locked, "serial (locked)"),
}


def table(facts: dict[str, Any]) -> str:
    """The result in words."""
    machine, options = facts["machine"], facts["options"]
    lines = [
        "# Accuracy of asynchronous runs",
        "",
        f"{options['seeds']} seeds, {options['epochs']:g} epochs of the embedded data, the same samples on both sides; "
        f"top-1 accuracy in percent. {machine['hardware']['processor']}, {machine['hardware']['cores']} cores, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/downpour/accuracy.py`.",
        "",
        "| method | replicas, shards | seeds | beside | seeds | difference of the means, points | updates/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in facts["results"].items():
        mine, theirs = (
            ", ".join(f"{100 * x:.2f}" for x in column) for column in zip(*result["accuracies"], strict=True)
        )
        gap = 100 * (result["mean"] - result["reference_mean"])
        lines.append(
            f"| {name} | {result['replicas']}, {result['shards']} | {mine} | {result['reference']} | {theirs} | "
            f"{gap:+.2f} | {result['updates_per_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=sorted(PAIRS))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (asynchronous, reference, words) in PAIRS.items():
        if options.only not in (None, name):
            continue
        pairs, speeds = [], []
        for seed in range(options.seeds):
            config = stretch(dataclasses.replace(recipes.load(name), seed=seed), options.epochs)
            config = apply_settings(config, options.set)
            one, other = asynchronous(config, device="cpu"), reference(config, device="cpu")
            assert one.facts["samples"] == other.facts["samples"]
            pairs.append((one.accuracy, other.accuracy))
            speeds.append(one.facts["updates_per_s"])
            print(
                f"{name} seed {seed}: {100 * one.accuracy:.2f} %, {words} {100 * other.accuracy:.2f} %, "
                f"{one.facts['updates_per_s']:.0f} updates/s, staleness {one.facts['staleness']}",
                flush=True,
            )
        mine, theirs = (statistics.mean(column) for column in zip(*pairs, strict=True))
        results[name] = {
            "accuracies": pairs,
            "mean": mine,
            "reference": words,
            "reference_mean": theirs,
            "replicas": config.asynchronous.replicas,
            "shards": config.asynchronous.shards if name == "downpour" else "-",
            "updates_per_s": statistics.median(speeds),
        }
        print(f"{name}: {100 * mine:.2f} % beside {100 * theirs:.2f} % {words}: {100 * (mine - theirs):+.2f} points")
    facts = {
        "options": {"seeds": options.seeds, "epochs": options.epochs, "set": options.set},
        "results": results,
        "machine": describe_machine(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "accuracy.json").write_text(json.dumps(facts, indent=1) + "\n")
    (options.out / "accuracy.md").write_text(table(facts))
    short = results.get("downpour", {"mean": 0.0, "reference_mean": 0.0})
    sys.exit(100 * (short["reference_mean"] - short["mean"]) > GOAL)


if __name__ == "__main__":
    main()
