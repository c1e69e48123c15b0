"""What a GPU trains in seconds, reduced to what two CPU cores train in minutes: `sprint` beside resnet9, equal steps.

    PYTHONPATH=src python benchmarks/cifar10/reduced.py --data FOLDER sprint cifar10

10,000 training images, batches of 512, six epochs (114 steps); 2,000 other training images judge. Every run is a line
of results/reduced.jsonl. `--set NAME=VALUE` changes settings, `--called` names the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import torch
from runs import commit

from bigstep import recipes
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.train import fit

RESULTS = Path(__file__).parent / "results" / "reduced.jsonl"


def main() -> None:
    """Train presets of `muon` one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", choices=("sprint", "cifar10"))
    parser.add_argument("--data", required=True, help="the folder of CIFAR-10's batches")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    parser.add_argument("--called", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--book", type=Path, default=RESULTS)
    options = parser.parse_args()
    whole = open_data("cifar10", options.data, 0.0, seed=0).train
    parts = torch.arange(options.images), torch.arange(options.images, options.images + 2000)
    data = tuple(whole.subset(indices) for indices in parts)
    for preset in options.presets:
        config = recipes.load("muon", preset)
        count = max(1, options.batch // config.workers.local_batch)
        usual = (f"workers.count={count}", "precision=float32", "evaluate_every=1", "checkpoint.every=0")
        config = apply_settings(stretch(config, options.epochs), (*usual, *options.settings))
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as out:
            result = fit(dataclasses.replace(config, seed=options.seed), data=data, out=out, device="cpu")
            rows = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        curve = [(round(row["epoch"], 2), row["accuracy"]) for row in rows if row["kind"] == "eval"]
        row = {"preset": preset, "called": options.called, "settings": options.settings, "seed": options.seed}
        row |= {"images": options.images, "batch": config.batch, "epochs": options.epochs, "steps": result.steps}
        row |= {"accuracy": result.accuracy, "loss": result.loss, "curve": curve, "commit": commit()}
        row |= {"wall_s": round(time.perf_counter() - begin, 1), "torch": torch.__version__}
        with options.book.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    main()
