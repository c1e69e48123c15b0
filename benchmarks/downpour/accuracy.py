"""Accuracy of the asynchronous methods beside the synchronous run in the same samples, over seeds.

    python benchmarks/downpour/accuracy.py [--seeds 3] [--epochs 10]

Downpour (2 shards, 3 replicas) beside the same configuration run synchronously; Hogwild! beside locked, which is the
serial run. Differences are in points of top-1 accuracy on the embedded data's test set. Writes accuracy.json beside
this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from bigstep import recipes
from bigstep.asynchronous import train_downpour, train_hogwild, train_locked
from bigstep.config import AsynchronousConfig, RunConfig
from bigstep.config_text import stretched
from bigstep.records import describe_machine
from bigstep.train import fit

HERE = Path(__file__).parent


def synchronous(config: RunConfig, **arguments: Any) -> Any:
    return fit(dataclasses.replace(config, asynchronous=AsynchronousConfig()), **arguments)


PAIRS = {
    "downpour": (train_downpour, synchronous, "synchronous"),
    "hogwild": (train_hogwild, train_locked, "serial (locked)"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--only", choices=sorted(PAIRS))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args()
    from bigstep.config_text import apply_settings

    results: dict[str, Any] = {}
    for name, (asynchronous, reference, words) in PAIRS.items():
        if options.only not in (None, name):
            continue
        pairs = []
        for seed in range(options.seeds):
            config = stretched(dataclasses.replace(recipes.load(name), seed=seed), options.epochs)
            config = apply_settings(config, options.set)
            one, other = asynchronous(config, device="cpu"), reference(config, device="cpu")
            assert one.facts["samples"] == other.facts["samples"]
            pairs.append((one.accuracy, other.accuracy))
            print(
                f"{name} seed {seed}: {100 * one.accuracy:.2f} %, {words} {100 * other.accuracy:.2f} %, "
                f"{one.facts['updates_per_s']:.0f} updates/s, staleness {one.facts['staleness']}",
                flush=True,
            )
        mine, theirs = (statistics.mean(column) for column in zip(*pairs, strict=True))
        results[name] = {"accuracies": pairs, "mean": mine, "reference": words, "reference_mean": theirs}
        print(f"{name}: {100 * mine:.2f} % beside {100 * theirs:.2f} % {words}: {100 * (mine - theirs):+.2f} points")
    facts = {"options": vars(options), "results": results, **describe_machine()}
    (HERE / "accuracy.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
