"""What 1-bit codes cost in accuracy: `onebit --preset mini` on 2 ranks beside the same run with a dense exchange.

    python benchmarks/exchange/accuracy.py [--seeds 3] [--epochs 20] [--out benchmarks/exchange/results/accuracy]

Real processes (`bigstep train --procs 2`); everything but the named settings is equal, and seeds are paired. Goals:
within 1 point of the dense run (mean over seeds); without error feedback visibly worse, as the paper says. Beside them,
the paper's other places of AdaGrad. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bigstep.records import describe_machine

HERE = Path(__file__).parent
DENSE = ("exchange.codec=none", "exchange.collective=ring", "exchange.warmup_steps=0")
NO_FEEDBACK = ("exchange.error_feedback=false",)
BEFORE = ("optimizer.adagrad=before",)
# without AdaGrad the rate is the one that was searched for `plain`
NONE = ("optimizer.adagrad=none", "optimizer.momentum=0.9", "lr.base=0.2", "lr.base_batch=256", "lr.scaling=linear")
# name -> (the dense run it is compared with, settings)
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "AdaGrad after, dense": ("AdaGrad after, dense", DENSE),
    "AdaGrad after, 1-bit": ("AdaGrad after, dense", ()),
    "AdaGrad after, 1-bit, no error feedback": ("AdaGrad after, dense", NO_FEEDBACK),
    "AdaGrad before, dense": ("AdaGrad before, dense", (*BEFORE, *DENSE)),
    "AdaGrad before, 1-bit": ("AdaGrad before, dense", BEFORE),
    "momentum SGD, dense": ("momentum SGD, dense", (*NONE, *DENSE)),
    "momentum SGD, 1-bit": ("momentum SGD, dense", NONE),
    "momentum SGD, 1-bit, no error feedback": ("momentum SGD, dense", (*NONE, *NO_FEEDBACK)),
}


def accuracy_of(settings: tuple[str, ...], seed: int, epochs: float) -> float:
    """Train in processes of their own and return the accuracy in per cent; a run that diverges has a tenth."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bigstep", "train", "onebit", "--procs", "2", "--device", "cpu", "--json",
                   "--no-report", "--epochs", str(epochs), "--out", f"{folder}/run"]  # fmt: skip
        for setting in (*settings, f"seed={seed}", f"evaluate_every={epochs}", "checkpoint.seconds=0"):
            command += ["--set", setting]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if "not finite" in last or "loss is" in last:
            return 10.0
        sys.exit(f"{' '.join(command)} failed: {last}")
    return 100 * float(json.loads(done.stdout)["accuracy"])


def row(own: list[float], dense: list[float]) -> dict[str, Any]:
    differences = [a - b for a, b in zip(own, dense, strict=True)]
    return {
        "n": len(own), "accuracies": own, "mean": statistics.mean(own), "min": min(own), "max": max(own),
        "against_dense": differences, "mean_against_dense": statistics.mean(differences),
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# Accuracy with 1-bit codes",
        "",
        "Written by `python benchmarks/exchange/accuracy.py`: `onebit --preset mini` on 2 ranks (real processes), "
        f"{result['epochs']:g} epochs, top-1 accuracy in per cent on the 2,000 test images; seeds are paired with "
        "those of the dense run.",
        "",
        f"- hardware: {machine['hardware']}",
        f"- versions: {machine['versions']}",
        f"- commit: {machine['commit']}",
        "",
        "| variant | n | mean | min-max | points against dense, mean | by seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in result["rows"].items():
        by_seed = ", ".join(f"{difference:+.2f}" for difference in one["against_dense"])
        lines.append(
            f"| {name} | {one['n']} | {one['mean']:.2f} | {one['min']:.2f}-{one['max']:.2f} | "
            f"{one['mean_against_dense']:+.2f} | {by_seed} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=20.0)
    parser.add_argument("--only", default="", help="part of a variant's name; its dense run comes along")
    parser.add_argument("--out", default=str(HERE / "results" / "accuracy"), help="OUT.json and OUT.md are written")
    options = parser.parse_args()
    chosen = [name for name in VARIANTS if options.only in name]
    names = [name for name in VARIANTS if name in chosen or name in {VARIANTS[one][0] for one in chosen}]
    seen: dict[str, list[float]] = {name: [] for name in names}
    result: dict[str, Any] = {"machine": describe_machine(), "epochs": options.epochs}
    for seed in range(options.seeds):
        for name in names:
            seen[name].append(accuracy_of(VARIANTS[name][1], seed, options.epochs))
            print(f"seed {seed}: {name}: {seen[name][-1]:.2f} %", flush=True)
        result["rows"] = {name: row(own, seen[VARIANTS[name][0]]) for name, own in seen.items()}
        Path(f"{options.out}.json").write_text(json.dumps(result, indent=1) + "\n")
        Path(f"{options.out}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
