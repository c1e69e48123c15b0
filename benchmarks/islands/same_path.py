"""Eight islands on 1, 2, 4 and 8 ranks, and two islands that span two ranks each: the same path, in float64.

    python benchmarks/islands/same_path.py [--out benchmarks/islands/results/same_path.md]

Runs of more than three meetings with SGD and with AdamW, through `bigstep train --procs N`. The largest relative
difference of a loss, and of a final weight relative to the largest of its tensor, from the run on one rank is written;
the exit status is 1 if one is more than 1e-10. Rows that are in OUT stay, so that a series may be broken off.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from bigstep.records import describe_machine, read_run

HERE = Path(__file__).parent
BOUND = 1e-10
EVERY, STEPS = 4, 14
COMMON = (
    "model=mlp", "workers.count=8", "workers.local_batch=8", f"islands.every={EVERY}", "precision=float64",
    "lr.scaling=none", "evaluate_every=1000", "checkpoint.every=0", "checkpoint.seconds=0", "data.holdout=0.9",
)  # fmt: skip
RULES = {
    "SGD, averaging": ("lr.base=0.02",),
    "AdamW, DiLoCo": (
        "optimizer={name: adamw, weight_decay: 0.1}", "lr.base=0.002",
        "islands.outer={name: nesterov, lr: 0.7, momentum: 0.9}",
    ),
}  # fmt: skip
WORLDS = {8: (1, 2, 4, 8), 2: (1, 4)}
"""By number of islands, the ranks; the first is what the others are compared with."""


def run(folder: Path, ranks: int, settings: tuple[str, ...]) -> None:
    """Train once."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "bigstep", "train", "localsgd", "--device", "cpu", "--no-report", "--json"]
    where = ["--out", str(folder), "--procs", str(ranks), "--steps", str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *where, *words], check=True, stdout=subprocess.DEVNULL, env=environment)


def apart(one: Path, other: Path) -> tuple[float, float]:
    """Return the largest relative difference of losses, and of weights."""
    pairs = zip(read_run(one).train, read_run(other).train, strict=True)
    losses = max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs)
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    weights = [
        (value - second[name]).abs().max() / value.abs().max().clamp_min(1e-300) for name, value in first.items()
    ]
    return losses, float(max(weights))


def main() -> int:
    """Run every world and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "same_path.md")
    options = parser.parse_args()
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    rows = [line for line in lines if line.startswith(tuple(f"| {rule} |" for rule in RULES))]
    with tempfile.TemporaryDirectory(prefix="bigstep-islands-") as scratch:
        for rule, settings in RULES.items():
            for islands, worlds in WORLDS.items():
                if sum(row.startswith(f"| {rule} | {islands} |") for row in rows) == len(worlds) - 1:
                    continue
                folders = [Path(scratch) / f"{rule[:3]}-{islands}-{ranks}" for ranks in worlds]
                for folder, ranks in zip(folders, worlds, strict=True):
                    run(folder, ranks, (*COMMON, *settings, f"islands.count={islands}"))
                for folder, ranks in zip(folders[1:], worlds[1:], strict=True):
                    losses, weights = apart(folders[0], folder)
                    rows.append(f"| {rule} | {islands} | {ranks} | {losses:.1e} | {weights:.1e} |")
                    print(rows[-1], flush=True)
                options.out.write_text(page(rows))
    return 1 if any(float(figure) > BOUND for row in rows for figure in row.split("|")[4:6]) else 0


def page(rows: list[str]) -> str:
    """Write the rows as Markdown."""
    machine = describe_machine()
    head = [
        "# Islands on other ranks", "",
        f"{STEPS} steps in float64, a meeting every {EVERY}, against the same run on one rank; at most {BOUND:g} is "
        f"allowed. {machine['hardware']['processor']}, {machine['hardware']['cores']} cores, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/islands/same_path.py`.", "",
        "| rule | islands | ranks | losses apart | weights apart |", "|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
