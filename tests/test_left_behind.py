"""What a process that was killed or hung up leaves behind: saved runs, no folders, no files outside its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigstep.config.text import config_from_mapping
from bigstep.engine import launch
from bigstep.engine.job import JOB_VARIABLE, Job
from bigstep.engine.scratch import Scratch, scratch_folder
from bigstep.errors import ConfigError, RunError
from bigstep.records import locked
from programs import environment


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that temporary ones are made in."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def test_a_scratch_folder_goes_with_whoever_made_it(temporary: Path) -> None:
    with scratch_folder() as folder:
        (folder / "store").write_text("x")
        assert list(temporary.iterdir()) == [folder]
    assert list(temporary.iterdir()) == []


def test_scratch_folders_of_killed_processes_are_swept_and_no_others(temporary: Path) -> None:
    left, theirs, linked = (
        temporary / f"bigstep-scratch-{name}" for name in ("abcd1234", "my_notes_of_may", "link0000")
    )
    (left / "deep").mkdir(parents=True)
    (left / "deep" / "job.json").write_text("{}")
    theirs.mkdir()
    linked.symlink_to(theirs)
    living = Scratch()
    with scratch_folder():
        assert not left.exists()
        assert living.path.exists(), "somebody is at work in it"
        assert theirs.exists(), "its name is none of ours"
        assert linked.is_symlink()
    living.close()
    living.close()
    assert not living.path.exists()


HOLD = "import time; from bigstep.engine.scratch import Scratch; print(Scratch().path, flush=True); time.sleep(60)"


def test_a_killed_process_gives_its_scratch_folder_free(temporary: Path) -> None:
    """The lock is one of the system, so it does not outlive the process that a folder belongs to."""
    command, more = [sys.executable, "-c", HOLD], environment(TMPDIR=str(temporary))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=more) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        Scratch().close()
        assert path.exists(), "its process is alive"
        holder.kill()
    Scratch().close()
    assert list(temporary.iterdir()) == []


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def sleeping(*_: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], process_group=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.usefixtures("handlers", "temporary")
def test_the_launcher_passes_on_whatever_asks_it_to_stop(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Ranks have process groups of their own: what a terminal that is closed says reaches them by the launcher only."""
    monkeypatch.setattr(launch, "_start", sleeping)
    base = {"workers": {"count": 2, "local_batch": 4}, "epochs": 1, "lr": {"base": 0.1}}
    with launch.started(2, Job(config=config_from_mapping(base), folder=Path("run"))) as ranks:
        os.kill(os.getpid(), number)
        ranks.wait(10)
        assert ranks.stop_number == number
        assert [process.poll() for process in ranks.processes] == [-number] * 2


@pytest.mark.usefixtures("handlers", "temporary")
def test_ctrl_c_while_ranks_start_is_not_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that listens already waits for the one that the signal has ended; it has nothing to save."""

    def start(rank: int, *_: object) -> subprocess.Popen[bytes]:
        listens = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if rank == 0 else None
        return subprocess.Popen(["sleep", "60"], process_group=0, preexec_fn=listens)

    monkeypatch.setattr(launch, "_start", start)
    base = {"workers": {"count": 2, "local_batch": 4}, "epochs": 1, "lr": {"base": 0.1}}
    with launch.started(2, Job(config=config_from_mapping(base), folder=Path("run"))) as ranks:
        os.kill(os.getpid(), signal.SIGINT)
        began = time.monotonic()
        with pytest.raises(RunError, match="before its state could be saved"):
            ranks.stopped()
        assert time.monotonic() - began < 8  # not the two minutes that saving may take


def test_a_rank_that_is_interrupted_before_it_listens_ends_by_the_signal() -> None:
    source = (
        "import sys, bigstep.cli\n"
        "app = sys.modules['bigstep.cli.app']\n"
        "def interrupted(job): raise KeyboardInterrupt\n"
        "app._as_rank = interrupted\n"
        "app.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], env=environment(**{JOB_VARIABLE: "job.json"}), timeout=60)
    assert done.returncode == -signal.SIGINT


@pytest.mark.usefixtures("handlers", "temporary")
def test_a_launcher_under_nohup_does_not_hear_a_hang_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_start", sleeping)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    base = {"workers": {"count": 2, "local_batch": 4}, "epochs": 1, "lr": {"base": 0.1}}
    with launch.started(1, Job(config=config_from_mapping(base), folder=Path("run"))) as ranks:
        os.kill(os.getpid(), signal.SIGHUP)
        assert ranks.stop_number == 0
        assert ranks.processes[0].poll() is None


@pytest.mark.parametrize("name", ["checkpoints", "meetings"])
def test_a_run_folder_whose_parts_are_links_to_other_folders_is_refused(tmp_path: Path, name: str) -> None:
    """A stranger's run folder would else write over the checkpoints of another run, and remove the old ones."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "step-000000001.ckpt").write_text("do not touch")
    (mine / ".notes.part").write_text("do not touch")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / name).symlink_to(mine)
    with pytest.raises(ConfigError, match=rf"{name} is a link to another folder"), locked(tmp_path / "theirs"):
        pass
    assert sorted(path.name for path in mine.iterdir()) == [".notes.part", "step-000000001.ckpt"]


def test_a_run_folder_that_is_a_link_as_a_whole_is_the_users_own_choice(tmp_path: Path) -> None:
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large-disk")
    with locked(tmp_path / "run"):
        (tmp_path / "run" / "run.json").write_text("{}")
    assert (tmp_path / "large-disk" / "run.json").exists()
