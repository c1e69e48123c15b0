"""kill -9 of a replica at random moments: training ends, and what is lost is at most the step it was in.

    python benchmarks/downpour/kills.py [--trials 10] [--seed 0] [--out FOLDER]

Each trial runs Downpour (2 shards, 3 replicas) on the embedded data for one epoch and kills one replica after a random
number of updates. Writes kills.json and kills.md; ends with status 1 if a trial fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bigstep import recipes
from bigstep.asynchronous import train_downpour
from bigstep.config.edit import stretch
from bigstep.records import describe_machine, read_run


def kill_after(folder: Path, name: str, updates: int, pause: float) -> None:
    """Wait until the records show some updates, a little longer, and kill a replica."""
    while True:
        time.sleep(0.01)
        if not (folder / "run.json").exists() or len(read_run(folder).train) < updates:
            continue
        time.sleep(pause)
        pid = next((child.pid for child in multiprocessing.active_children() if child.name == name), None)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return


def trial(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    config = stretch(dataclasses.replace(recipes.load("downpour"), seed=seed), 2.0)
    config = dataclasses.replace(config, asynchronous=dataclasses.replace(config.asynchronous, warm_start=0.0))
    victim, updates, pause = rng.randrange(3), rng.randrange(1, 500), rng.random() / 2
    with tempfile.TemporaryDirectory() as folder:
        killer = threading.Thread(
            target=kill_after, args=(Path(folder), f"replica-{victim}", updates, pause), daemon=True
        )
        killer.start()
        result = train_downpour(config, out=folder, device="cpu")
        notes = read_run(Path(folder)).notes
    named = any(f"Replica {victim} was killed by SIGKILL" in note for note in notes)
    return {
        "victim": victim,
        "after_updates": updates,
        "updates": result.facts["updates"],
        "lost_updates": result.facts["lost_updates"],
        "accuracy": result.accuracy,
        "named": named,
        "holds": named and result.facts["lost_updates"] <= 1,
    }


def table(results: dict[str, Any]) -> str:
    """The result in words."""
    trials, machine = results["trials"], results["machine"]
    held = sum(each["holds"] for each in trials)
    lines = [
        "# Replicas of Downpour killed at random moments",
        "",
        f"{held} of {len(trials)} trials held: training ended, the note names the replica, at most the step it was in "
        f"was lost. {machine['hardware']['processor']}, {machine['hardware']['cores']} cores, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/downpour/kills.py`.",
        "",
        "| killed | after updates | updates in all | lost | accuracy | named | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| replica {each['victim']} | {each['after_updates']} | {each['updates']} | {each['lost_updates']} | "
        f"{each['accuracy']:.3f} | {'yes' if each['named'] else 'no'} | {'yes' if each['holds'] else 'no'} |"
        for each in trials
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    trials = []
    for number in range(options.trials):
        trials.append(trial(options.seed + number))
        print(json.dumps(trials[-1]), flush=True)
    held = sum(each["holds"] for each in trials)
    results = {"trials": trials, "machine": describe_machine()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kills.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "kills.md").write_text(table(results))
    print(f"{held} of {len(trials)} trials: training ended, the note names the replica, at most one step was lost")
    sys.exit(held != len(trials))


if __name__ == "__main__":
    main()
