"""`bigstep train` as people run it: several processes, killed at any moment, resumed."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigstep import recipes
from bigstep.cli import main
from bigstep.cli.imports import collector_off
from bigstep.config.text import apply_settings
from bigstep.records import read_run
from bigstep.train import fit
from warm import Program
from worlds import World

SETTINGS = [
    "model=mlp", "workers.count=6", "workers.local_batch=16", "epochs=0.5", "exchange.bucket_mb=0.1",
    "checkpoint.every=0.03", "precision=float64", "evaluate_every=0.25", "lr.base=0.02", "lr.scaling=none",
]  # fmt: skip


def command(folder: Path, procs: int, *more: str) -> list[str]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    train = [sys.executable, "-m", "bigstep", "train", "--device", "cpu", "--json", "--no-report"]
    return [*train, "--procs", str(procs), "--out", str(folder), *settings, *more]


def train(folder: Path, procs: int, *more: str) -> dict[str, Any]:
    done = subprocess.run(command(folder, procs, *more), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)  # one object and nothing else
    return result


def train_here(folder: Path) -> dict[str, Any]:
    """The same run on the ranks that call this, without the command."""
    return fit(apply_settings(recipes.load("plain", "mini"), SETTINGS), out=folder, device="cpu").facts


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_when(folder: Path, rows: int, procs: int) -> None:
    """Start a run, kill its launcher without warning once `rows` rows are written, and see that no rank is left."""
    process = Program(command(folder, procs)[3:])
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
def test_killed_and_resumed_equals_uninterrupted(world: Callable[[int], World], tmp_path: Path) -> None:
    whole = world(2).run(train_here, tmp_path / "whole")[0]
    kill_when(tmp_path / "killed", 12, 2)
    resumed = train(tmp_path / "killed", 2, "--resume")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["steps"] == whole["steps"]
    once, twice = read_run(tmp_path / "whole"), read_run(tmp_path / "killed")
    assert [(row["step"], row["loss"]) for row in twice.train] == [(row["step"], row["loss"]) for row in once.train]
    assert any(note.startswith("Resumed at step") for note in twice.notes)
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
        assert key in resumed
    assert resumed["ranks"] == 2
    alone = train_here(tmp_path / "alone")
    assert alone["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-10)
    assert alone["ranks"] == 1


def test_a_run_is_not_resumed_with_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bigstep", *command(tmp_path / "run", 1, "--steps", "1", *more)[3:]])
        with pytest.raises(SystemExit) as ending:
            main()
        return int(ending.value.code or 0)

    assert call() == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 1
    assert call("--resume", "--set", "lr.base=0.3") == 2
    said = capsys.readouterr()
    assert "was started with lr.base=" in said.err
    assert said.out == ""


def test_a_setting_that_did_not_exist_when_a_run_was_started_has_its_default() -> None:
    from bigstep.config.edit import find_change
    from bigstep.config.text import config_to_mapping

    config = recipes.load("plain", "mini")
    before = config_to_mapping(config)
    del before["lr"]["warmup_batch"]
    assert find_change(before, config) is None
    asked = apply_settings(config, ["lr.warmup_batch=64"])
    assert "lr.warmup_batch=0, but now lr.warmup_batch=64" in str(find_change(before, asked))
    before["lr"]["invented"] = 3
    assert "lr.invented=3" in str(find_change(before, config)), "a field of another release is not passed over"


def listened_on(pid: int) -> list[str]:
    """The addresses that a process listens on, as the kernel writes them."""
    sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path / "run", 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 50
    while lines(tmp_path / "run") < 3 and time.monotonic() < deadline:
        time.sleep(0.01)  # watching a file that another program writes
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    addresses = [address for child in children for address in listened_on(int(child))]
    assert addresses, "ranks wait for one another's connections"
    assert set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F", f"{0:024X}01000000"}, "on the loopback"
    os.kill(int(children[1]), signal.SIGKILL)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "Rank 1 was killed by SIGKILL" in err
    assert out == ""


def test_fast_commands_do_not_import_torch() -> None:
    program = """
import sys
from bigstep.cli import main
from bigstep.cli.imports import collector_off
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


def test_a_run_starts_without_torch_s_compiler(tmp_path: Path) -> None:
    """With a rule of torch's own, which would import it twice over."""
    program = """
import sys
from bigstep.cli import main
try:
    main()
except SystemExit as ending:
    assert not ending.code, ending.code
assert "torch.optim" in sys.modules
assert "torch._dynamo" not in sys.modules, "two seconds for nothing"
"""
    words = ["train", "plain", "--steps", "1", "--no-report", "--json", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


LEAVING = """
import atexit, sys, threading, types
sys.modules.setdefault("torch", types.ModuleType("torch"))
from bigstep.__main__ import program

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
atexit.register(print, "at exit")
threading.Timer(0.2, print, ["a thread"]).start()
program()
"""


@pytest.mark.parametrize(("word", "status"), [("--version", 0), ("no-such-command", 2)])
def test_a_process_with_torch_ends_in_order_but_is_not_taken_apart(word: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING, word], capture_output=True, text=True, timeout=30)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-2:] == ["a thread", "at exit"]


def test_output_that_cannot_be_written_is_no_success() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", LEAVING, "--version"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode != 0
    assert b"No space left" in done.stderr


def test_the_collector_rests_while_a_command_imports_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    with collector_off():  # torch is here already: somebody else's program
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before, "none was set aside; some of those before may have ended"
    monkeypatch.delitem(sys.modules, "torch")
    with collector_off():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
