"""The processes of a check: named when they fail, replaced, and never left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bigstep.check import PROPERTIES, Pool
from bigstep.cli import main
from bigstep.errors import RunError


def total() -> float:
    """One collective, to know that the world is whole."""
    one = torch.ones(())
    dist.all_reduce(one)
    return float(one)


def misbehave(rank: int, how: str) -> float:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ZeroDivisionError("one over nothing")
        if how == "die":
            os._exit(7)
        threading.Event().wait()
    return 1.0


@pytest.mark.parametrize(
    ("how", "words"),
    [("raise", "Rank 1 of 2: ZeroDivisionError: one over nothing"), ("die", "Rank 1 of 2: ended with status 7")],
)
def test_a_rank_that_fails_is_named_and_the_pool_goes_on(check_pool: Pool, how: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        check_pool.run(2, misbehave, 1, how)
    assert check_pool.run(2, total) == [2.0, 2.0]


def test_a_rank_that_hangs_is_ended_after_the_timeout() -> None:
    with Pool(call_timeout_s=120) as pool:
        pids = pool.run(2, os.getpid)
        pool.run(2, total)
        pool.call_timeout_s = 1.0
        with pytest.raises(RunError, match="Rank 0 of 2: did not answer within 1 s"):
            pool.run(2, misbehave, 0, "hang")
        folder = pool.folder
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not folder.exists()


def test_no_process_outlives_a_program_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal\n"
        "from bigstep.check import Pool\n"
        "if __name__ == '__main__':\n"
        "    print(Pool().run(2, os.getpid), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == -9, done.stderr
    for pid in json.loads(done.stdout):
        assert _gone(pid), f"process {pid} is still there"


def _gone(pid: int) -> bool:
    """The kernel ends it at once, but whoever inherits it may take a moment to collect it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def test_the_command_fails_where_a_property_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", "onebit", "--ranks", "1,2", "--json"]
    for setting in ("exchange.error_feedback=false", "model=mlp"):
        arguments += ["--set", setting]
    monkeypatch.setattr(sys, "argv", ["bigstep", *arguments])
    with pytest.raises(SystemExit) as ending:
        main()
    said = capsys.readouterr()
    assert ending.value.code == 1, said.err
    report = json.loads(said.out)
    assert [row["name"] for row in report["rows"] if row["status"] == "fail"] == ["exchange = no exchange"]
    last = len(PROPERTIES)
    assert f"{last}/{last}" in said.err, "progress is told while it works"
