"""SIGKILL at the worst moments of exact runs: each must end with the weights of an untouched run, bit for bit.

    python benchmarks/faults/exact_kills.py                  # 100 kills, up to six a run, on 2 to 4 ranks
    python benchmarks/faults/exact_kills.py --stops 3        # and ranks that are stopped for a minute

Six kinds of kills, in random order: a random rank at a random moment; the first rank; two ranks at once; whoever writes
a checkpoint, while its temporary file is there; the launcher, whose run is then resumed on another number of ranks; and
any of them at the very end. Every run ends with: one SHA-256, the losses of all steps equal in every bit, no step
missing or twice, no torn file, no process and no temporary folder left. Results of several calls are put together by
--append. Writes exact_kills.json and exact_kills.md; the exit status is 1 if any run went wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kills import checkpoints, ranks_of

from bigstep.engine.checkpoint import load_checkpoint
from bigstep.records import describe_machine, read_run

SETTINGS = [
    "model=small", "workers.count=6", "workers.local_batch=8", "epochs=1", "exchange.bucket_mb=0.05",
    "checkpoint.every=0.02", "evaluate_every=0.5", "lr.base=0.05", "lr.scaling=none", "data.holdout=0.6",
]  # fmt: skip
KINDS = ("rank", "first", "two", "checkpoint", "launcher", "end")
A_RUN = 6
PATIENCE_S = 300.0


def command(folder: Path, *more: str) -> list[str]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    program = [sys.executable, "-m", "bigstep", "train", "--exact", "--device", "cpu", "--json", "--no-report"]
    return [*program, "--out", str(folder), *settings, *more]


class Victim:
    """A run that is killed, and goes on."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.log = folder.with_suffix(".log")
        self.struck: list[dict[str, Any]] = []
        self.seen: set[int] = set()
        self.start()

    def start(self, *more: str) -> None:
        """Start it on a random number of ranks."""
        self.ranks = self.chance.choice((2, 3, 4))
        self.temporary = self.folder.with_suffix(".tmp")
        self.temporary.mkdir(exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command(self.folder, "--procs", str(self.ranks), "--elastic", *more),
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            )  # fmt: skip

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def hosted(self) -> dict[int, int]:
        """Process numbers by rank, once there are any."""
        while not self.over:
            if found := ranks_of(self.process.pid):
                self.seen.update(found.values())
                return found
            time.sleep(0.01)
        return {}

    def await_checkpoint(self) -> None:
        """Wait for a checkpoint that was not there, since a run that never gets to write one gives up."""
        newest = max(checkpoints(self.folder), default=None)
        while not self.over and max(checkpoints(self.folder), default=None) in (newest, None):
            time.sleep(0.02)

    def await_moment(self, kind: str) -> None:
        """Wait for the moment that a kind of kill asks for."""
        temporary = self.folder / "checkpoints"
        if kind == "checkpoint":
            while not self.over and not any(path.suffix != ".ckpt" for path in _listed(temporary)):
                time.sleep(0.0002)
        elif kind == "end":
            while not self.over and self.step() < self.last:
                time.sleep(0.001)
            time.sleep(self.chance.uniform(0.0, 0.5))
        else:
            time.sleep(self.chance.uniform(0.0, 1.5))

    last = 0

    def step(self) -> int:
        """The last step in the records."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as rows:
                rows.seek(max(0, rows.seek(0, 2) - 1500))
                return max(json.loads(line).get("step", 0) for line in rows.read().splitlines()[1:-1])
        except (OSError, ValueError):
            return 0

    def strike(self, kind: str) -> bool:
        """Kill; return whether there was something to kill."""
        self.await_moment(kind)
        ranks = self.hosted()
        if not ranks or self.over:
            return False
        names = sorted(ranks)
        who: list[int] | str
        if kind == "launcher" or (kind == "end" and self.chance.random() < 0.4):
            who = "launcher"
            self.process.kill()
        else:
            chosen = {"first": [0], "checkpoint": [0], "two": self.chance.sample(names, min(2, len(names)))}
            who = sorted(chosen.get(kind, [self.chance.choice(names)]))
            for rank in who:
                os.kill(ranks.get(rank, ranks[names[0]]), signal.SIGKILL)
        torn = [path.name for path in _listed(self.folder / "checkpoints") if path.suffix != ".ckpt"]
        kept = [path.stem for path in checkpoints(self.folder)]
        self.struck.append({"kind": kind, "who": who, "of": len(ranks), "step": self.step(), "torn": bool(torn),
                            "last": kept[-1] if kept else None})  # fmt: skip
        if who == "launcher":
            self.process.wait()
            self.go_on()
        return True

    def go_on(self) -> None:
        """Resume it; one that was killed before it had begun is begun, as a refusal to resume it would say."""
        self.start(*["--resume"] * (self.folder / "run.json").exists())

    def finish(self) -> tuple[int, str]:
        """Let it end; one that has given up, as it says, is resumed."""
        for _ in range(4):
            while not self.over and ranks_of(self.process.pid):
                self.hosted()
                time.sleep(0.1)
            out, _ = self.process.communicate(timeout=PATIENCE_S)
            if self.process.returncode == 0:
                break
            self.go_on()
        return self.process.returncode, out


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def wrong(status: int, out: str, victim: Victim, whole: dict[str, Any]) -> str | None:
    """What is wrong with a run that has ended, or None."""
    if status != 0:
        return f"status {status}: {victim.log.read_text()[-500:]}"
    # a rank that is killed after the result was told lets it be told again
    result, run = json.loads(out.strip().splitlines()[-1]), read_run(victim.folder)
    if result["weights_sha256"] != whole["sha"]:
        return f"the weights are {result['weights_sha256'][:16]} instead of {whole['sha'][:16]}"
    steps = [row["step"] for row in run.train]
    if steps != list(range(1, len(whole["losses"]) + 1)):
        return "steps are missing from the records, or there twice"
    if [row["loss"] for row in run.train] != whole["losses"]:
        return "a loss differs"
    if (result["accuracy"], result["eval_loss"]) != whole["evaluation"]:
        return "the evaluation differs"
    for path in checkpoints(victim.folder):
        load_checkpoint(path)  # raises unless its checksum holds
    left = [path.name for path in victim.folder.rglob("*") if path.suffix == ".part"]
    left += [path.name for path in victim.temporary.glob("*bigstep*")]
    if left:
        return f"files were left: {left}"
    alive = [pid for pid in victim.seen if Path(f"/proc/{pid}/environ").exists() and _is_ours(pid)]
    return f"processes were left: {alive}" if alive else None


def _is_ours(pid: int) -> bool:
    try:
        return b"bigstep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def run_whole(folder: Path) -> dict[str, Any]:
    """On one rank, touched by nobody."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command(folder), capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    losses = [row["loss"] for row in read_run(folder).train]
    return {"sha": result["weights_sha256"], "losses": losses, "evaluation": (result["accuracy"], result["eval_loss"])}


def kill_some(folder: Path, kinds: list[str], whole: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    began = time.monotonic()
    victim = Victim(folder, chance)
    victim.last = len(whole["losses"])
    try:
        for number, kind in enumerate(sorted(kinds, key=lambda kind: kind == "end")):
            if number:
                victim.await_checkpoint()
            if not victim.strike(kind):
                break
        status, out = victim.finish()
        fault = wrong(status, out, victim, whole)
    except subprocess.TimeoutExpired:
        fault = f"not done after {PATIENCE_S:g} s"
    finally:
        victim.process.kill()
        victim.process.wait()
    return {"ranks": victim.ranks, "kills": victim.struck, "fault": fault, "seconds": time.monotonic() - began}


def stop_one(folder: Path, whole: dict[str, Any], chance: random.Random, seconds: float = 60.0) -> dict[str, Any]:
    """Stop a rank for a minute, which is longer than the run's patience; resume what ended."""
    victim = Victim.__new__(Victim)
    victim.folder, victim.chance, victim.log = folder, chance, folder.with_suffix(".log")
    victim.struck, victim.seen = [], set()
    ranks: dict[int, int] = {}
    while not ranks:  # on a busy machine ranks may be silent for 20 s by themselves
        victim.start("--timeout", "20", *["--resume"] * (folder / "run.json").exists())
        victim.await_checkpoint()
        ranks = victim.hosted()
    rank = chance.choice(sorted(ranks))
    os.kill(ranks[rank], signal.SIGSTOP)
    began = time.monotonic()
    while not victim.over and time.monotonic() - began < seconds:
        time.sleep(0.1)
    told_s = time.monotonic() - began
    status = victim.process.poll()
    if Path(f"/proc/{ranks[rank]}").exists():
        os.kill(ranks[rank], signal.SIGCONT)
    said = [line for line in victim.log.read_text().splitlines() if line.startswith("bigstep: ")]
    named = any(f"rank {rank} is silent" in line for line in said)
    victim.process.wait(timeout=PATIENCE_S)
    victim.start("--resume")
    fault = wrong(*victim.finish(), victim, whole)
    return {"rank": rank, "of": len(ranks), "status": status, "seconds": told_s, "named": named, "fault": fault,
            "said": said[:1]}  # fmt: skip


def table(found: dict[str, Any]) -> str:
    machine, kills = found["machine"], [kill for run in found["runs"] for kill in run["kills"]]
    lines = [
        "# Kills at the worst moments, and the same bits", "",
        f"{len(kills)} kills in {len(found['runs'])} exact runs: {found['faults']} went wrong; every other one ended "
        f"with the SHA-256 of an untouched run on one rank, `{found['sha'][:16]}…`, and its losses in every bit. "
        f"{machine['hardware']['processor']}, {machine['hardware']['cores']} cores, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/faults/exact_kills.py`.", "",
        "| what was killed | kills | of which the launcher | a torn file was there |", "|---|---|---|---|",
    ]  # fmt: skip
    words = {
        "rank": "a random rank", "first": "the first rank", "two": "two ranks at once", "checkpoint": "rank 0, writing "
        "a checkpoint", "launcher": "the launcher; resumed on 2 to 4 ranks", "end": "any of them, at the end",
    }  # fmt: skip
    counts = Counter(kill["kind"] for kill in kills)
    for kind in KINDS:
        mine = [kill for kill in kills if kill["kind"] == kind]
        by = sum(kill["who"] == "launcher" for kill in mine)
        lines.append(f"| {words[kind]} | {counts[kind]} | {by} | {sum(kill['torn'] for kill in mine)} |")
    if found["stops"]:
        lines += ["", "Ranks that were stopped for a minute, with `--timeout 20`:", "",
                  "| rank | of | named | the run ended after, s | resumed |", "|---|---|---|---|---|"]  # fmt: skip
    for stop in found["stops"]:
        lines.append(
            f"| {stop['rank']} | {stop['of']} | {'yes' if stop['named'] else 'NO'} | {stop['seconds']:.0f} | "
            f"{stop['fault'] or 'the same bits'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--append", action="store_true", help="add to the results that are there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    chance, began, path = random.Random(options.seed), time.monotonic(), options.out / "exact_kills.json"
    before = json.loads(path.read_text()) if options.append and path.exists() else {"runs": [], "stops": []}
    runs, stops, done = before["runs"], before["stops"], 0
    chance.seed(f"{options.seed}/{len(runs)}/{len(stops)}")  # none of those that are there again
    with tempfile.TemporaryDirectory(prefix="bigstep-kills-") as scratch:
        whole = run_whole(Path(scratch) / "whole")
        assert before.get("sha", whole["sha"]) == whole["sha"], "another release, or another machine"
        for number in itertools.count():
            if done >= options.kills or time.monotonic() - began > options.seconds:
                break
            kinds = chance.sample(KINDS, A_RUN)
            runs.append(kill_some(Path(scratch) / f"run-{number}", kinds, whole, chance))
            done += len(runs[-1]["kills"])
            struck = " ".join(kill["kind"] for kill in runs[-1]["kills"])
            print(f"{done}: {runs[-1]['seconds']:.0f} s, {struck}: {runs[-1]['fault'] or 'the same bits'}", flush=True)
            keep(path, whole["sha"], runs, stops)
        for number in range(options.stops):
            stops.append(stop_one(Path(scratch) / f"stop-{number}", whole, chance))
            print(json.dumps(stops[-1]), flush=True)
            keep(path, whole["sha"], runs, stops)
    return 1 if keep(path, whole["sha"], runs, stops) else 0


def keep(path: Path, sha: str, runs: list[dict[str, Any]], stops: list[dict[str, Any]]) -> int:
    """Write what was seen so far; return how much of it went wrong."""
    faults = sum(each["fault"] is not None for each in [*runs, *stops]) + sum(not stop["named"] for stop in stops)
    found = {"faults": faults, "sha": sha, "settings": SETTINGS, "machine": describe_machine(), "runs": runs,
             "stops": stops}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(found))
    return faults


if __name__ == "__main__":
    sys.exit(main())
