"""`bigstep train` as people run it: several processes, killed at any moment, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bigstep.records import read_run

SETTINGS = [
    "model=mlp", "data.holdout=0.9", "workers.count=6", "workers.local_batch=16", "epochs=8", "exchange.bucket_mb=0.1",
    "checkpoint.every=0.3", "precision=float64", "evaluate_every=4",
]  # fmt: skip


def command(folder: Path, procs: int, *more: str) -> list[str]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    train = [sys.executable, "-m", "bigstep", "train", "--device", "cpu", "--json", "--no-report"]
    return [*train, "--procs", str(procs), "--out", str(folder), *settings, *more]


def train(folder: Path, procs: int, *more: str) -> dict[str, object]:
    done = subprocess.run(command(folder, procs, *more), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)  # one object and nothing else
    return result


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_when(folder: Path, rows: int, procs: int) -> None:
    """Start a run, kill its launcher without warning once `rows` rows are written, and see that no rank is left."""
    process = subprocess.Popen(command(folder, procs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while lines(folder) < rows and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)  # watching a file that another program writes
    assert process.poll() is None, "the run ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    grown, still = lines(folder), 0.0
    deadline = time.monotonic() + 20
    while still < 0.5 and time.monotonic() < deadline:
        time.sleep(0.05)
        still = still + 0.05 if lines(folder) == grown else 0.0
        grown = lines(folder)
    assert still >= 0.5, "ranks went on writing after their launcher died"


@pytest.mark.timeout(240)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2)
    kill_when(tmp_path / "killed", 25, 2)
    resumed = train(tmp_path / "killed", 2, "--resume")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["steps"] == whole["steps"]
    once, twice = read_run(tmp_path / "whole"), read_run(tmp_path / "killed")
    assert [(row["step"], row["loss"]) for row in twice.train] == [(row["step"], row["loss"]) for row in once.train]
    assert any(note.startswith("Resumed at step") for note in twice.notes)
    alone = train(tmp_path / "alone", 1)
    assert alone["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-10)
    for key in (
        "accuracy",
        "loss",
        "seconds",
        "steps",
        "samples",
        "batch",
        "workers",
        "ranks",
        "weights_sha256",
        "run",
    ):
        assert key in alone
    assert alone["ranks"] == 1
    assert whole["ranks"] == 2

    changed = subprocess.run(
        command(tmp_path / "whole", 1, "--resume", "--set", "lr.base=0.3"), capture_output=True, text=True, timeout=60
    )
    assert changed.returncode == 2
    assert "was started with lr.base=" in changed.stderr
    assert changed.stdout == ""


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path / "run", 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 50
    while lines(tmp_path / "run") < 3 and time.monotonic() < deadline:
        time.sleep(0.01)  # watching a file that another program writes
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "Rank 1 was killed by SIGKILL" in err
    assert out == ""


def test_fast_commands_do_not_import_torch() -> None:
    program = """
import sys
from bigstep.cli import main
sys.argv = ["bigstep", *sys.argv[1:]]
try:
    main()
except SystemExit as ending:
    assert not ending.code, ending.code
assert "torch" not in sys.modules, "torch was imported"
"""
    for arguments in (["--help"], ["train", "--help"], ["recipes"], ["recipes", "sony"], ["recipes", "sony", "--yaml"]):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
