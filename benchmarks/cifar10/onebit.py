"""1-bit exchange against dense: four ranks that share one GPU, the same settings as the table's runs on one rank.

    PYTHONPATH=src python benchmarks/cifar10/onebit.py --data FOLDER --book results/runs.jsonl

The three seeds of a system run at the same time, so their seconds say nothing. Dense ranks take the path of one rank
(tests/test_same_path.py), so the dense side is the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import Book

RANKS, BATCH, SEEDS = 4, 2048, 3
SYSTEMS = {
    "plain": ("exchange.codec=onebit", "exchange.collective=gather", "exchange.warmup_steps=24"),
    "onebit": (),  # its preset has codes
}


def main() -> None:
    """Run what the book lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of CIFAR-10's batches")
    parser.add_argument("--book", type=Path, default=Path(__file__).parent / "results" / "runs.jsonl")
    options = parser.parse_args()
    for recipe, settings in SYSTEMS.items():
        known = Book(options.book).rows
        names = {seed: f"codes {recipe} {BATCH} ranks {RANKS} seed {seed}" for seed in range(SEEDS)}
        missing = {seed: name for seed, name in names.items() if name not in known}
        with tempfile.TemporaryDirectory() as out:
            started = {seed: _start(recipe, settings, seed, options.data, Path(out)) for seed in missing}
            for seed, process in started.items():
                shown, _ = process.communicate()
                if process.returncode:
                    raise SystemExit(f"{missing[seed]} failed.")
                facts = json.loads(shown)
                row = {key: facts[key] for key in ("accuracy", "loss", "steps")}
                row = {"name": missing[seed], "recipe": recipe, "seed": seed, "ranks": RANKS, **row}
                with options.book.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['name']}: {100 * row['accuracy']:.2f} %", flush=True)


def _start(recipe: str, settings: tuple[str, ...], seed: int, data: str, out: Path) -> subprocess.Popen[str]:
    changed = (f"workers.count={BATCH // 32}", f"seed={seed}", "evaluate_every=1000", *settings)
    sets = [word for setting in changed for word in ("--set", setting)]
    # fmt: off
    command = [
        sys.executable, "-m", "bigstep", "train", recipe, "--preset", "cifar10", "--data", data, "--procs", str(RANKS),
        "--device", "shared", "--json", "--out", str(out / f"{recipe}-{seed}"), *sets,
    ]
    # fmt: on
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()
