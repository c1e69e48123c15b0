"""Programs that crash, hang, ask, fork or write: one sentence, nothing left running, nothing of the user's changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bigstep.cli import app
from bigstep.doctor import Examination, examine
from bigstep.doctor.launch import Limits
from bigstep.doctor.report import verdict, write_page
from bigstep.errors import ConfigError

LIMITS = Limits(total_s=20, stall_s=2, grace_s=2)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def look_at(project: Path, source: str) -> Examination:
    (project / "train.py").write_text(source)
    return examine(["train.py"], limits=LIMITS)


@pytest.mark.parametrize(
    "source, words",
    [
        (
            "def step():\n    raise ValueError('shapes do not fit')\nstep()\n",
            "ValueError: shapes do not fit (train.py:2)",
        ),
        ("input('lr? ')\n", "it asked for input"),
        ("import no_such_package\n", "it needs a package that is not installed here"),
        ("raise RuntimeError('No CUDA GPUs are available')\n", "it needs a GPU"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "status -11"),
        ("import time\ntime.sleep(1000)\n", "it stood still"),
        ("print('what trains is imported by another')\n", "no update of a torch optimizer was seen"),
    ],
)
def test_trouble_is_told_in_one_sentence(project: Path, source: str, words: str) -> None:
    result = look_at(project, source)
    assert words in result.trouble
    assert not result.to_mapping()["healthy"]
    assert verdict(result).startswith("The program could not be examined to the end")


def test_a_script_that_could_not_be_examined_passes_no_ci(project: Path) -> None:
    (project / "train.py").write_text("pass\n")
    with pytest.raises(SystemExit) as left:
        app(["doctor", "train.py"], prog_name="bigstep")
    assert left.value.code == 1


def test_no_process_outlives_the_examination(project: Path) -> None:
    pids = project / "pids"
    pids.mkdir()
    look_at(
        project,
        "import os, time\n"
        "for leaves in (False, True):\n"
        "    if os.fork() == 0:\n"
        "        if leaves:\n"
        "            os.setsid()\n"  # a daemon, in a group of its own
        f"        open(os.path.join({str(pids)!r}, str(os.getpid())), 'w').close()\n"
        "        time.sleep(1000)\n"
        "time.sleep(1)\n",
    )
    assert len(list(pids.iterdir())) == 6  # two of each rank: one, and then two of them
    deadline = time.monotonic() + 5
    while any(_runs(int(path.name)) for path in pids.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [path.name for path in pids.iterdir() if _runs(int(path.name))]


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except OSError:
        return False


def test_what_the_program_writes_never_meets_the_users_files(project: Path) -> None:
    (project / "results.txt").write_text("a month of work")
    look_at(project, "open('results.txt', 'w').write('gone')\nopen('new.txt', 'w').write('x')\n")
    assert (project / "results.txt").read_text() == "a month of work"
    assert not (project / "new.txt").exists()


def test_new_results_beside_many_old_ones_land_in_the_copy(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(project / "tmp"))
    (project / "tmp").mkdir()
    old = project / "runs" / "old"
    old.mkdir(parents=True)
    for number in range(201):
        (old / str(number)).touch()
    program = (
        "assert open('runs/old/7').read() == ''\nopen('runs/new', 'w').close()\nopen('runs/old/new', 'w').close()\n"
    )
    notes = look_at(project, program).notes
    assert [path.name for path in (project / "runs").iterdir()] == ["old"]
    assert any(note.startswith(f"The program wrote {old / 'new'}") for note in notes), "deeper ones are told at least"


@pytest.mark.parametrize("act", ["open({!r}, 'w')", "os.remove({!r})", "os.rename({!r}, 'x')", "open({!r}, 'a')"])
def test_a_file_named_by_its_full_path_is_kept(project: Path, act: str) -> None:
    precious = project / "elsewhere" / "weights.bin"
    precious.parent.mkdir()
    precious.write_text("a month of work")
    os.utime(precious, (1, 1))
    result = look_at(project, f"import os\n{act.format(str(precious))}\n")
    assert precious.read_text() == "a month of work"
    assert "it was about to change a file of yours" in result.trouble


TREE = """
import os, shutil
folder = {!r}
open(os.path.join(folder, "new.txt"), "w").close()  # the folder looks new from now on
{}
"""


@pytest.mark.parametrize("act", ["shutil.rmtree(folder)", "os.rename(folder, folder + '2')"])
def test_a_folder_that_got_a_new_file_keeps_its_old_ones(project: Path, act: str) -> None:
    precious = project / "elsewhere" / "deeper" / "weights.bin"
    precious.parent.mkdir(parents=True)
    precious.write_text("a month of work")
    result = look_at(project, TREE.format(str(project / "elsewhere"), act))
    assert precious.read_text() == "a month of work"
    assert "it was about to change a file of yours" in result.trouble


def test_a_folder_that_the_program_made_may_go_again(project: Path) -> None:
    copied = project / "elsewhere" / "copied"
    (project / "elsewhere").mkdir()
    (project / "old.txt").write_text("its copy carries its old time of change")
    os.utime(project / "old.txt", (1, 1))
    program = f"import shutil\nshutil.copytree('.', {str(copied)!r})\nshutil.rmtree({str(copied)!r})\n"
    assert "a file of yours" not in (look_at(project, program).trouble or "")
    assert not copied.exists()


def test_an_empty_lock_may_be_taken_and_a_full_one_may_not(project: Path) -> None:
    (project / "elsewhere").mkdir()
    empty, full = project / "elsewhere" / "data.lock", project / "elsewhere" / "poetry.lock"
    empty.touch()
    full.write_text("content-hash")
    assert "a file of yours" not in (look_at(project, f"open({str(empty)!r}, 'w')\n").trouble or "")
    assert "a file of yours" in look_at(project, f"open({str(full)!r}, 'w')\n").trouble
    assert full.read_text() == "content-hash"


def test_new_files_elsewhere_are_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(project / "tmp"))
    (project / "tmp").mkdir()
    result = look_at(project, f"open({str(project / 'log.txt')!r}, 'w').close()\n")
    assert any("log.txt" in note for note in result.notes)


def test_a_script_beside_the_folder_is_found_and_its_trouble_told_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "train.py").write_text("raise ValueError('shapes do not fit')\n")
    (project / "here").mkdir()
    monkeypatch.chdir(project / "here")
    result = examine(["../train.py"], limits=LIMITS)
    assert "shapes do not fit" in result.trouble
    assert "shapes do not fit" in verdict(result)
    assert [note for note in result.notes if "ended after" in note] == [
        "The run on 1 rank ended after no updates, for the same reason.",
        "The run on 2 ranks ended after no updates, for the same reason.",
    ]


def test_mistakes_in_the_command_are_told_before_anything_starts(project: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        examine(["missing.py"])
    (project / "folder").mkdir()
    with pytest.raises(ConfigError, match="folder is a folder"):
        examine(["folder"])
    (project / "train.py").write_text("")
    with pytest.raises(ConfigError, match="--ranks is 1"):
        examine(["train.py"], ranks=1)
    with pytest.raises(ConfigError, match="--steps is 1"):
        examine(["train.py"], steps=1)
    with pytest.raises(ConfigError, match="must be one of samples"):
        examine(["train.py"], only="sample")
    with pytest.raises(ConfigError, match="--device is 'gpu', but it must be auto or cpu"):
        examine(["train.py"], device="gpu")
    with pytest.raises(ConfigError, match="-m names no module"):
        examine(["-m"])
    with pytest.raises(ConfigError, match="There is no option '--rank'"):
        examine(["--rank", "4", "train.py"])


def test_a_notebook_is_no_script_though_python_reads_its_json(project: Path) -> None:
    (project / "train.ipynb").write_text('{"cells": []}')
    with pytest.raises(ConfigError, match="jupyter nbconvert --to script train.ipynb"):
        examine(["train.ipynb"])


@pytest.mark.parametrize(
    "command", ["python train.py", "/usr/bin/python3.12 train.py", "torchrun --nproc-per-node 2 train.py --lr 1"]
)
def test_a_line_that_starts_a_script_is_answered_with_the_doctors(project: Path, command: str) -> None:
    (project / "train.py").write_text("")
    with pytest.raises(ConfigError, match="leave it and its options out.*bigstep doctor train.py"):
        examine(command.split())


def test_an_option_of_the_doctor_behind_the_script_is_not_lost_in_silence(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "train.py").write_text("")
    with pytest.raises(SystemExit):
        app(["doctor", "train.py", "--html=page.html", "--steps", "3"], prog_name="bigstep")
    told = capfd.readouterr().err
    assert "--html=page.html stands after the script, which gets it" in told
    assert "--steps stands" not in told  # many a script has it


def test_a_page_that_cannot_be_written_is_told_before_minutes_of_work(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "train.py").write_text("")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="page.html cannot be written: you may not write to"):
        app(["doctor", "--html", "page.html", "train.py"], prog_name="bigstep")
    assert "one rank" not in capfd.readouterr().err


def test_no_faults_in_what_was_not_examined_look_like_no_success(project: Path) -> None:
    write_page(look_at(project, "raise ValueError('no data')\n"), project / "page.html")
    tile = (project / "page.html").read_text().partition("<li")[2].partition("</li>")[0]
    assert 'class="faults"' in tile
    assert "as far as it was examined" in tile
