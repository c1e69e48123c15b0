"""Is this release slower than an older one? Both in one run, in turns, on the same machine.

    git worktree add ../older 93375f2
    python benchmarks/loop/releases.py ../older [--rounds 5]

Each round runs, for both trees: the loop against a hand-written DDP loop (`benchmarks/loop/run.py` of that tree),
`bigstep train plain` from the shell, and `bigstep --help`. Writes releases.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bigstep.records import describe_machine

HERE = Path(__file__).parent
TREE = HERE.parent.parent


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree / "src")}


def wall_of(tree: Path, *words: str) -> tuple[float, float]:
    """Seconds that a command takes from the shell, in an empty folder; and seconds of processor."""
    with tempfile.TemporaryDirectory() as folder:
        started, worked = time.perf_counter(), _processor()
        subprocess.run(
            [sys.executable, "-m", "bigstep", *words],
            cwd=folder, env=environment(tree), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return time.perf_counter() - started, _processor() - worked


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def loop_of(tree: Path, steps: int) -> tuple[float, float]:
    """A step of the tree's own loop over one of the hand-written loop: seconds, and seconds of processor."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(shutil.copy(tree / "benchmarks/loop/run.py", folder))  # its result is written beside it
        words = [sys.executable, script, "--ranks", "2", "--repeats", "3", "--steps", str(steps)]
        subprocess.run(words, env=environment(tree), check=True, stdout=subprocess.DEVNULL)
        seen = json.loads((Path(folder) / "result-2.json").read_text())
        return float(seen["ratio"]["median"]), float(seen["ratio_of_median_cpu_times"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("older", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--epochs", default="2")
    options = parser.parse_args()
    trees = {"older": options.older.resolve(), "this": TREE}
    measures = {
        "loop / hand-written": lambda tree: loop_of(tree, options.steps),
        "train, seconds": lambda tree: wall_of(tree, "train", "plain", "--epochs", options.epochs),
        "help, seconds": lambda tree: wall_of(tree, "--help"),
    }
    kinds = [f"{name}{kind}" for name in measures for kind in ("", ", processor")]
    seen: dict[str, dict[str, list[float]]] = {name: {tree: [] for tree in trees} for name in kinds}
    for tree in trees.values():
        wall_of(tree, "--help")  # byte code is written once
    for round_ in range(options.rounds):
        for name, measure in measures.items():
            for tree in list(trees) if round_ % 2 else list(trees)[::-1]:
                wall, processor = measure(trees[tree])
                seen[name][tree].append(wall)
                seen[f"{name}, processor"][tree].append(processor)
    summary: dict[str, object] = {
        "options": {"rounds": options.rounds, "steps": options.steps, "epochs": options.epochs}
    }
    for name, values in seen.items():
        medians = {tree: statistics.median(value) for tree, value in values.items()}
        paired = [new / old for old, new in zip(values["older"], values["this"], strict=True)]
        summary[name] = {"medians": medians, "this / older": statistics.median(paired), "values": values}
        print(f"{name}: older {medians['older']:.3f}, this {medians['this']:.3f}, ratio {statistics.median(paired):.3f}"
              f" ({min(paired):.3f} to {max(paired):.3f}), n = {len(paired)}")  # fmt: skip
    (HERE / "releases.json").write_text(json.dumps(summary | describe_machine(), indent=1) + "\n")


if __name__ == "__main__":
    main()
