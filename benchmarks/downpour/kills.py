"""kill -9 of replicas and shards at random moments: training ends, the note names who, and little is lost.

    python benchmarks/downpour/kills.py [--trials 20] [--seed 0] [--append] [--out FOLDER]

Each trial runs Downpour (2 shards, 3 replicas) on the embedded data for an epoch and kills a replica or a shard, in
turn, after a random number of updates. Of a replica at most the step it was in may be lost; of a shard, what it has
updated since its checkpoint, which is written every fifth of an epoch. Writes kills.json and kills.md after every
trial; --append leaves out those that are there, so that a series may be broken off. Ends with status 1 if a trial
fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import random
import re
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

EVERY = 0.2
"""Epochs between two checkpoints of a shard."""


def kill_after(folder: Path, name: str, updates: int, pause: float) -> None:
    """Wait until the records show some updates, a little longer, and kill a process."""
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
    config = stretch(dataclasses.replace(recipes.load("downpour"), seed=seed), 1.0)
    config = dataclasses.replace(
        config,
        asynchronous=dataclasses.replace(config.asynchronous, warm_start=0.0),
        checkpoint=dataclasses.replace(config.checkpoint, every=EVERY),
    )
    kind = ("replica", "shard")[seed % 2]
    victim, updates, pause = rng.randrange(3 if kind == "replica" else 2), rng.randrange(1, 300), rng.random() / 2
    with tempfile.TemporaryDirectory() as folder:
        killer = threading.Thread(
            target=kill_after, args=(Path(folder), f"{kind}-{victim}", updates, pause), daemon=True
        )
        killer.start()
        result = train_downpour(config, out=folder, device="cpu")
        notes = read_run(Path(folder)).notes
    name = f"{kind.capitalize()} {victim}"
    named = any(note.startswith(f"{name} was killed by SIGKILL") for note in notes)
    back = [
        int(found[1]) for note in notes if (found := re.search(rf"{name} is back .*; (\d+) updates were lost", note))
    ]
    updates_an_epoch = result.facts["updates"] + result.facts["lost_updates"]
    allowed = 1 if kind == "replica" else EVERY * updates_an_epoch + 3
    lost = result.facts["lost_updates"] if kind == "replica" else max(back, default=-1)
    return {
        "seed": seed,
        "victim": f"{kind} {victim}",
        "after_updates": updates,
        "updates": result.facts["updates"],
        "lost_updates": lost,
        "accuracy": result.accuracy,
        "named": named,
        "holds": named and 0 <= lost <= allowed and math.isfinite(result.loss),
    }


def table(results: dict[str, Any]) -> str:
    """The result in words."""
    trials, machine = results["trials"], results["machine"]
    held = sum(each["holds"] for each in trials)
    lines = [
        "# Replicas and shards of Downpour killed at random moments",
        "",
        f"{held} of {len(trials)} trials held: training ended, the note names who was killed; of a replica at most the "
        f"step it was in was lost, of a shard at most what it had updated since its checkpoint (a fifth of an epoch). "
        f"{machine['hardware']['processor']}, {machine['hardware']['cores']} cores, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/downpour/kills.py`.",
        "",
        "| killed | after updates | updates in all | lost | accuracy | named | holds |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['victim']} | {each['after_updates']} | {each['updates']} | {each['lost_updates']} | "
        f"{each['accuracy']:.3f} | {'yes' if each['named'] else 'no'} | {'yes' if each['holds'] else 'no'} |"
        for each in trials
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--append", action="store_true", help="leave out trials that are there")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "kills.json"
    before = json.loads(path.read_text())["trials"] if options.append and path.exists() else []
    trials = [each for each in before if "seed" in each]  # older ones do not say which they were
    for seed in range(options.seed, options.seed + options.trials):
        if seed in (each["seed"] for each in trials):
            continue
        trials.append(trial(seed))
        print(json.dumps(trials[-1]), flush=True)
        results = {"trials": trials, "machine": describe_machine()}
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(results))
    held = sum(each["holds"] for each in trials)
    print(f"{held} of {len(trials)} trials: training ended, the note names who was killed, little was lost")
    sys.exit(held != len(trials))


if __name__ == "__main__":
    main()
