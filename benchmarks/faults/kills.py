"""SIGKILL of random ranks at random moments of elastic runs: each must finish, on the path of an untouched one.

    python benchmarks/faults/kills.py                        # 50 runs of 2 to 4 ranks, one kill each
    python benchmarks/faults/kills.py --kills 5 --a-run 5    # one run that loses five ranks

Writes kills.json and kills.md; the exit status is 1 if any run went wrong. A run is compared with one that nobody
touched, on one rank and in float64: losses of all steps, final weights and evaluation, each to 1e-10. What lies on disk
afterwards must be whole: every checkpoint's checksum, every row, no temporary file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bigstep.engine.checkpoint import load_checkpoint
from bigstep.records import describe_machine, read_run

BOUND = 1e-10  # float64 rounds at 1e-16; another order of sums along 100 steps
SETTINGS = [
    "model=mlp", "workers.count=6", "workers.local_batch=16", "epochs=0.8", "precision=float64",
    "exchange.bucket_mb=0.1", "checkpoint.every=0.03", "evaluate_every=0.2", "lr.base=0.02", "lr.scaling=none",
]  # fmt: skip


def command(folder: Path, *more: str) -> list[str]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    program = [sys.executable, "-m", "bigstep", "train", "--device", "cpu", "--json", "--no-report"]
    return [*program, "--out", str(folder), *settings, *more]


def start(folder: Path, log: Path, *more: str) -> subprocess.Popen[str]:
    with log.open("w") as errors:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command(folder, *more), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*.ckpt"))


def ranks_of(launcher: int) -> dict[int, int]:
    """Process numbers by rank, of the ranks that run."""
    found = {}
    try:
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    found[int(entry[5:])] = int(child)
    except OSError:  # one ended while it was looked at
        pass
    return found


def strike(process: subprocess.Popen[str], folder: Path, chance: random.Random) -> dict[str, Any] | None:
    """Kill a random rank; return what it was doing, or None if the run was over."""
    while process.poll() is None:
        ranks = ranks_of(process.pid)
        if ranks:
            rank = chance.choice(sorted(ranks))
            done = checkpoints(folder)
            os.kill(ranks[rank], signal.SIGKILL)
            return {"rank": rank, "of": len(ranks), "last_checkpoint": done[-1].name if done else None}
        time.sleep(0.02)  # between two starts
    return None


def run_with_kills(folder: Path, ranks: int, kills: int, whole: Whole, chance: random.Random) -> dict[str, Any]:
    """One elastic run; kills come at uniformly random moments, the first from its start, later ones from a checkpoint.

    A kill waits for a checkpoint after the one before it, since a run that never gets to write one gives up.
    """
    began, struck, log = time.monotonic(), [], folder.with_suffix(".log")
    process = start(folder, log, "--procs", str(ranks), "--elastic")
    try:
        for number in range(kills):
            newest = max(checkpoints(folder), default=None)
            if number:
                while process.poll() is None and max(checkpoints(folder), default=None) in (newest, None):
                    time.sleep(0.02)
            time.sleep(chance.uniform(0.0, whole.seconds if kills == 1 else 0.5))  # the random moment itself
            hit = strike(process, folder, chance)
            if hit is None:
                break
            struck.append(hit)
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    said = [line for line in log.read_text().splitlines() if line.startswith("bigstep: ")]
    fault = wrong(process.returncode, out, folder, whole) if struck else None
    seconds = time.monotonic() - began
    return {"ranks": ranks, "kills": struck, "fault": fault, "seconds": seconds, "said": said}


class Whole:
    """A finished run that nobody touched, on one rank."""

    def __init__(self, folder: Path, seconds: float) -> None:
        run = read_run(folder)
        self.seconds, self.result = seconds, run.result
        self.losses = [row["loss"] for row in run.train]
        self.weights = load_checkpoint(checkpoints(folder)[-1])["model"]


def run_whole(folder: Path) -> Whole:
    began = time.monotonic()
    process = start(folder, folder.with_suffix(".log"))
    process.communicate(timeout=300)
    assert process.returncode == 0, folder.with_suffix(".log").read_text()
    return Whole(folder, time.monotonic() - began)


def wrong(status: int, out: str, folder: Path, whole: Whole) -> str | None:
    """What is wrong with a finished run, or None."""
    if status != 0:
        return f"status {status}"
    result, run = json.loads(out), read_run(folder)
    if [row["step"] for row in run.train] != list(range(1, len(whole.losses) + 1)):
        return "steps are missing from the records, or there twice"
    for row, loss in zip(run.train, whole.losses, strict=True):
        if abs(row["loss"] - loss) > BOUND * abs(loss):
            return f"the loss of step {row['step']} is {row['loss']} instead of {loss}"
    if abs(result["eval_loss"] - whole.result["eval_loss"]) > BOUND * whole.result["eval_loss"]:
        return f"the evaluation gives {result['eval_loss']} instead of {whole.result['eval_loss']}"
    kept = checkpoints(folder)
    for path in kept:
        weights = load_checkpoint(path)["model"]  # raises unless its checksum holds
    for name, tensor in whole.weights.items():
        if (weights[name] - tensor).abs().max() > BOUND * tensor.abs().max():
            return f"the weights {name} differ"
    left = [path.name for path in folder.rglob("*.part")]
    if left or not (folder / "metrics.jsonl").read_bytes().endswith(b"\n"):
        return f"torn files were left: {left or 'metrics.jsonl'}"
    return None


def table(results: dict[str, Any]) -> str:
    lines = [
        "# Ranks killed at random moments", "",
        f"{results['kills']} kills in {len(results['runs'])} elastic runs: {results['faults']} went wrong. "
        f"{results['machine']['hardware']['processor']}, {results['machine']['hardware']['cores']} cores, "
        f"torch {results['machine']['versions']['torch']}, commit {results['machine']['commit']}; "
        f"an uninterrupted run takes {results['whole_seconds']:.1f} s. Made by `benchmarks/faults/kills.py`.", "",
        "| ranks | killed | last checkpoint then | seconds | result |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for run in results["runs"]:
        killed = ", ".join(str(kill["rank"]) for kill in run["kills"])
        last = ", ".join((kill["last_checkpoint"] or "none").removesuffix(".ckpt") for kill in run["kills"])
        lines.append(f"| {run['ranks']} | {killed} | {last} | {run['seconds']:.1f} | {run['fault'] or 'same path'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--a-run", type=int, default=1, help="kills in one run")
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks, taken in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    chance, sizes, runs = random.Random(options.seed), [int(size) for size in options.ranks.split(",")], []
    with tempfile.TemporaryDirectory(prefix="bigstep-kills-") as scratch:
        whole = run_whole(Path(scratch) / "whole")
        done, tries = 0, 0
        while done < options.kills and tries < 2 * options.kills:
            size, folder = sizes[tries % len(sizes)], Path(scratch) / f"run-{tries}"
            run = run_with_kills(folder, size, min(options.a_run, options.kills - done), whole, chance)
            tries += 1
            if run["kills"]:  # else it was over before its moment came
                runs.append(run)
                done += len(run["kills"])
                print(f"{done}: {size} ranks, {run['seconds']:.1f} s, {run['fault'] or 'same path'}", flush=True)
    results = {
        "kills": done, "faults": sum(run["fault"] is not None for run in runs), "seed": options.seed,
        "whole_seconds": whole.seconds, "settings": SETTINGS, "machine": describe_machine(), "runs": runs,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kills.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "kills.md").write_text(table(results))
    return 1 if results["faults"] or done < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
