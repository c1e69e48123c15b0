"""SIGKILL of ranks with islands at random moments: none loses more than its steps since the last meeting.

    python benchmarks/islands/kills.py [--kills 20] [--out benchmarks/islands/results/kills]

Runs of four islands on two to four ranks, one kill each, in three ways by turns:

    exact   with --exact: the final weights must have the bits of an untouched run on one rank
    apart   the islands of the other ranks must stay where they are, at the step that was recorded last or later; those
            of the killed rank must come back with the agreed weights, and the records must name them
    gone    the same, and what the killed islands had kept is taken away too, as by a machine that is lost

No checkpoint is written before the end, so a run goes on from what islands keep or from nothing at all. What an island
had kept last is noted at the moment of the kill; the run must go on from there or from later. A kill before the islands
have met is no exception. Kills that
were done before stay in OUT.json, so that a series may be broken off; OUT.md is written anew. The exit status is 1 if
any run went wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bigstep.engine.islands_of import islands_of_rank
from bigstep.records import describe_machine, read_run

HERE = Path(__file__).parent
ISLANDS = 4
EVERY = (5, 25)
"""Steps between meetings, by turns: more often than rows are recorded, and less; exact runs take the first."""
SETTINGS = [
    "model=mlp", f"islands.count={ISLANDS}", "workers.count=4", "workers.local_batch=16",
    "epochs=3", "precision=float64", "checkpoint.every=0", "checkpoint.seconds=0", "evaluate_every=10", "lr.base=0.02",
    "lr.scaling=none", "data.holdout=0.9",
]  # fmt: skip
WAYS = ("exact", "apart", "gone")
RANKS = (2, 3, 4)


def start(folder: Path, way: str, every: int, *more: str) -> subprocess.Popen[str]:
    """Start a run; what it prints on standard error goes beside its folder."""
    settings = [part for setting in (*SETTINGS, f"islands.every={every}") for part in ("--set", setting)]
    program = [sys.executable, "-m", "bigstep", "train", "localsgd", "--device", "cpu", "--json", "--no-report"]
    command = [*program, "--out", str(folder), *settings, *(["--exact"] if way == "exact" else []), *more]
    with folder.with_suffix(".log").open("w") as errors:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)


def run_whole(folder: Path, way: str) -> dict[str, Any]:
    """Return what a run gives that nobody touches, on one rank."""
    process = start(folder, way, EVERY[0])
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, folder.with_suffix(".log").read_text()
    return {**json.loads(out), "losses": [row["loss"] for row in read_run(folder).train]}


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


def last_kept(folder: Path, island: int) -> int:
    """Return the step of the last meeting that an island has kept; 0 where there was none."""
    steps = [0]
    for path in folder.glob("meetings/*/step-*.ckpt"):
        first, stop = map(int, path.parent.name.split("-"))
        if island in range(first, stop):
            steps.append(int(path.stem.removeprefix("step-")))
    return max(steps)


def steps_recorded(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b'"train"') if file.exists() else 0


def strike(
    process: subprocess.Popen[str], folder: Path, way: str, steps: int, chance: random.Random
) -> dict[str, Any] | None:
    """Kill a random rank in the midst of training; return what it was, or None if the run was over."""
    while process.poll() is None and not steps_recorded(folder):
        time.sleep(0.02)
    until = chance.randrange(1, steps * 3 // 4)  # a random step, and a random moment near it
    while process.poll() is None and steps_recorded(folder) < until:
        time.sleep(0.005)
    time.sleep(chance.uniform(0.0, 0.2))
    ranks = ranks_of(process.pid)
    if process.poll() is not None or not ranks:
        return None
    rank = chance.choice(sorted(ranks))
    os.kill(ranks[rank], signal.SIGKILL)
    islands = list(islands_of_rank(ISLANDS, rank, len(ranks)))
    kept = [last_kept(folder, island) for island in islands]
    if way == "gone":
        for path in folder.glob(f"meetings/{islands[0]}-{islands[-1] + 1}/*.ckpt"):
            path.unlink()
    return {"rank": rank, "of": len(ranks), "islands": islands, "kept": kept, "steps": steps_recorded(folder)}


def kill_once(
    folder: Path, way: str, every: int, ranks: int, whole: dict[str, Any], chance: random.Random
) -> dict[str, Any]:
    """One elastic run with one kill."""
    began = time.monotonic()
    process = start(folder, way, every, "--procs", str(ranks), "--elastic")
    try:
        hit = strike(process, folder, way, len(whole["losses"]), chance)
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    seen: dict[str, Any] = {"way": way, "every": every, "ranks": ranks, "kill": hit}
    seen["seconds"] = time.monotonic() - began
    if hit is None:
        return seen
    seen["notes"] = read_run(folder).notes
    told = " ".join(seen["notes"])
    begun = re.search(r"Resumed at step (\d+)\.|Nothing to resume", told)
    seen["from"] = seen["others"] = int(begun[1] or 0) if begun else 0
    if apart := re.search(r"came back at step (\d+) .*? lost: (\d+) steps?\. The others go on from step (\d+)", told):
        seen |= {"from": int(apart[1]), "lost": int(apart[2]), "others": int(apart[3])}
    seen["eval_loss"] = json.loads(out)["eval_loss"] if process.returncode == 0 else None
    seen["fault"] = wrong(process.returncode, out, seen, folder, whole)
    return seen


def wrong(status: int, out: str, seen: dict[str, Any], folder: Path, whole: dict[str, Any]) -> str | None:
    """Say what is wrong with a finished run, or return None."""
    if status != 0:
        return f"status {status}: {folder.with_suffix('.log').read_text().strip().splitlines()[-1:]}"
    hit, result, run = seen["kill"], json.loads(out), read_run(folder)
    if seen["from"] < min(hit["kept"]):
        return f"went on from step {seen['from']}, but its islands had kept step {min(hit['kept'])}"
    names = f"with island {', '.join(map(str, hit['islands']))} was lost"
    if not any(names in note for note in seen["notes"]):
        return f"no note says {names!r}"
    if [row["step"] for row in run.train] != list(range(1, len(whole["losses"]) + 1)):
        return "steps are missing from the records, or there twice"
    if seen["way"] == "exact":
        same = result["weights_sha256"] == whole["weights_sha256"]
        return None if same else "the final weights differ from those of an untouched run"
    if seen.get("lost", 0) > seen["every"] or seen["others"] < hit["steps"]:
        return f"the others went on from step {seen['others']}, though step {hit['steps']} was recorded"
    return None


def table(results: dict[str, Any]) -> str:
    """Write the runs as Markdown."""
    runs, machine = results["runs"], results["machine"]
    redone = max(run["kill"]["steps"] - run["from"] for run in runs)
    ends = [run["eval_loss"] for run in runs if run["way"] != "exact" and run["eval_loss"]] or [math.nan]
    lines = [
        "# Islands killed at random moments", "",
        f"{len(runs)} kills, one a run: {sum(run['fault'] is not None for run in runs)} went wrong. {ISLANDS} islands, "
        f"{len(results['whole']['apart']['losses'])} steps; at most {redone} recorded steps were done "
        "again, by the lost islands alone except in exact runs. *exact*: the bits of an untouched run; *apart*: the "
        "other islands stay where they are, and the lost ones come back with the agreed weights; *gone*: the same, and "
        f"what these had kept was taken away too. Loss at the end {min(ends):.4f} to {max(ends):.4f}, untouched "
        f"{results['whole']['apart']['eval_loss']:.4f}. "
        f"{machine['hardware']['processor']}, {machine['hardware']['cores']} cores with other work to do, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/islands/kills.py`.", "",
        "| way | H | ranks | killed | islands | kept | recorded | came back at | steps lost | the others | result |",
        "|---|--:|--:|--:|---|--:|--:|--:|--:|--:|---|",
    ]  # fmt: skip
    for run in runs:
        hit = run["kill"]
        islands = ", ".join(map(str, hit["islands"]))
        lines.append(
            f"| {run['way']} | {run['every']} | {run['ranks']} | {hit['rank']} | {islands} | {min(hit['kept'])} | "
            f"{hit['steps']} | {run['from']} | {run.get('lost', 0)} | {run['others']} | {run['fault'] or 'right'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Kill until there were enough, or until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="begin no further run after so long")
    parser.add_argument("--out", default=str(HERE / "results" / "kills"))
    options = parser.parse_args()
    file, begun = Path(f"{options.out}.json"), time.monotonic()
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"whole": {}, "runs": [], "tries": 0}
    results["machine"] = describe_machine()
    with tempfile.TemporaryDirectory(prefix="bigstep-kills-") as scratch:
        for way in ("exact", "apart"):
            if way not in results["whole"]:
                results["whole"][way] = run_whole(Path(scratch) / f"whole-{way}", way)
        results["whole"]["gone"] = results["whole"]["apart"]
        while len(results["runs"]) < options.kills and time.monotonic() - begun < 60 * options.minutes:
            tries = results["tries"]
            chance = random.Random(options.seed * 1000 + tries)
            way, ranks = WAYS[tries % len(WAYS)], RANKS[tries // len(WAYS) % len(RANKS)]
            every = EVERY[0] if way == "exact" else EVERY[tries % 2]
            seen = kill_once(Path(scratch) / f"run-{tries}", way, every, ranks, results["whole"][way], chance)
            results["tries"] += 1
            if seen["kill"] is not None:  # else it was over before its moment came
                results["runs"].append(seen)
                print(f"{len(results['runs'])}: {way}, {ranks} ranks, {seen['fault'] or 'right'}", flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results, indent=1) + "\n")
    if results["runs"]:
        Path(f"{options.out}.md").write_text(table(results))
    return 1 if any(run["fault"] for run in results["runs"]) or len(results["runs"]) < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
