"""What 1-bit codes cost in accuracy: runs on 2 ranks beside the same run with a dense exchange, over seeds.

    python benchmarks/exchange/accuracy.py [--seeds 3] [--out benchmarks/exchange/results/accuracy]

Real processes (`bigstep train onebit --procs 2`); everything but the named settings is equal, and seeds are paired.
Goals: `onebit --preset mini` within 1 point of its dense run (mean over seeds); without error feedback visibly worse,
as the paper says. Batch norm and AdaGrad hide most of what is lost without feedback, so that claim is also shown where
the paper made it: a fully connected network, momentum SGD, many small steps. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
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
CONNECTED = (
    "model=mlp", "data.augment=none", "workers.count=4", "workers.local_batch=16", "optimizer.adagrad=none",
    "optimizer.momentum=0.9", "optimizer.weight_decay=0.0", "lr.base=0.05", "exchange.warmup_steps=0",
)  # fmt: skip
# setting -> (epochs, its own settings, variants); a setting's first variant is what the others are compared with
CASES: dict[str, tuple[float, tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "mini": (
        20.0,
        (),
        {
            "dense": DENSE,
            "1-bit": (),
            "1-bit, AdaGrad before": ("optimizer.adagrad=before",),
            "1-bit, no error feedback": NO_FEEDBACK,
        },
    ),
    "mini in a quarter of its epochs": (5.0, (), {"dense": DENSE, "1-bit": ()}),
    "fully connected, momentum SGD, batch 64, no dense steps": (
        6.0,
        CONNECTED,
        {"dense": DENSE, "1-bit": (), "1-bit, no error feedback": NO_FEEDBACK},
    ),
}


def accuracy_of(settings: tuple[str, ...], seed: int, epochs: float) -> float:
    """Train in processes of their own and return the accuracy in per cent."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bigstep", "train", "onebit", "--procs", "2", "--device", "cpu",
                   "--json", "--no-report", "--epochs", str(epochs), "--out", f"{folder}/run"]  # fmt: skip
        for setting in (*settings, f"seed={seed}", f"evaluate_every={epochs}", "checkpoint.seconds=0"):
            command += ["--set", setting]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed: {done.stderr.strip()[-300:]}")
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
        "Written by `python benchmarks/exchange/accuracy.py`: recipe `onebit` on 2 ranks (real processes), accuracy "
        "in per cent on the 2,000 test images of the embedded set; seeds are paired with those of the dense run.",
        "",
        f"- hardware: {machine['hardware']}",
        f"- versions: {machine['versions']}",
        f"- commit of each setting: {result['commits']}",
        "",
        "| setting | variant | n | mean | min-max | against dense, mean | by seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, rows in result["cases"].items():
        for name, one in rows.items():
            by_seed = ", ".join(f"{difference:+.2f}" for difference in one["against_dense"])
            lines.append(
                f"| {case} | {name} | {one['n']} | {one['mean']:.2f} | {one['min']:.2f}-{one['max']:.2f} | "
                f"{one['mean_against_dense']:+.2f} | {by_seed} |"
            )
    lines += ["", "Settings (`--set`), with `--epochs`:", ""]
    for case in result["cases"]:
        epochs, own, _ = CASES[case]
        lines.append(f"- {case}: {epochs:g} epochs; {' '.join(own) or 'the preset'}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a setting's name; OUT.json keeps what it has of the others")
    parser.add_argument("--out", default=str(HERE / "results" / "accuracy"), help="OUT.json and OUT.md are written")
    options = parser.parse_args()
    machine, file = describe_machine(), Path(f"{options.out}.json")
    before = json.loads(file.read_text()) if options.only and file.exists() else {"commits": {}, "cases": {}}
    result: dict[str, Any] = {**before, "machine": machine}
    for case, (epochs, own, variants) in CASES.items():
        if options.only not in case:
            continue
        seen: dict[str, list[float]] = {name: [] for name in variants}
        for seed in range(options.seeds):
            for name, settings in variants.items():
                accuracy = accuracy_of((*own, *settings), seed, epochs)
                seen[name].append(accuracy)
                print(f"{case}, seed {seed}, {name}: {accuracy:.2f} %", flush=True)
        dense = next(iter(seen.values()))
        result["cases"][case] = {name: row(accuracies, dense) for name, accuracies in seen.items()}
        result["commits"][case] = machine["commit"]
        file.write_text(json.dumps(result, indent=1) + "\n")
        Path(f"{options.out}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
