"""`bigstep train` from the words to the ranks: resolved once, checked before a process starts, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigstep.engine.launch import program
from bigstep.errors import ConfigError
from bigstep.records import RunWriter, locked, read_run

QUICK = [
    "--device", "cpu", "--json", "--no-report", "--model", "mlp", "--workers", "2", "--batch", "16",
]  # fmt: skip

Bigstep = Callable[..., tuple[int, str, str]]


def fields(call: tuple[int, str, str]) -> Any:
    status, out, err = call
    assert status == 0, err
    return json.loads(out)


def test_ranks_take_no_module_from_the_current_folder_before_python_s_own(tmp_path: Path) -> None:
    for name in ("yaml", "random", "typing", "typer"):
        (tmp_path / f"{name}.py").write_text("open('run-by-mistake', 'w')\nraise SystemExit(3)\n")
    done = subprocess.run(
        program("train", *QUICK, "--steps", "1", "--procs", "2", "--out", "run"),
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
    assert not (tmp_path / "run-by-mistake").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--procs", "64"], "the run has 32 workers"),
        (["--procs", "100000"], "the run has 32 workers"),
        (["--procs", "100000", "--workers", "100000"], "would only wait for one another"),
        (["downpour", "--procs", "2"], "starts its own processes"),
    ],
)
def test_ranks_that_cannot_run_are_refused_before_a_process_starts(
    bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: list[str], words: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    status, _, err = bigstep("train", *more)
    assert status == 2
    assert words in err
    assert list(tmp_path.iterdir()) == [], "a refused start left a folder behind"


def test_ranks_that_memory_does_not_hold_are_refused(bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch) -> None:
    from bigstep.cli import resolve

    monkeypatch.setattr(resolve, "_free_bytes", lambda: 1e9)
    status, _, err = bigstep("train", "--procs", "4")
    assert status == 2
    assert "this machine has memory for 3 of them" in err


def test_files_that_a_container_has_read_do_not_take_memory_from_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from bigstep.cli import resolve

    monkeypatch.setattr(resolve, "_GROUP", tmp_path)
    for name, content in {
        "memory.current": "900000",
        "memory.stat": "anon 100000\nfile 800000\nactive_file 300000\ninactive_file 400000",
        "memory.max": "1000000",
    }.items():
        (tmp_path / name).write_text(f"{content}\n")
    assert resolve._free_bytes() == 800_000
    (tmp_path / "memory.max").write_text("max\n")
    assert resolve._free_bytes() > 1_000_000


def test_the_recipe_is_resolved_once_whatever_becomes_of_its_file(bigstep: Bigstep, tmp_path: Path) -> None:
    """A rank that read the file again would find another batch than the launcher."""
    from bigstep.cli.resolve import job_of
    from bigstep.cli.train import Train
    from bigstep.engine.job import Job

    (tmp_path / "run.yaml").write_text("workers: {count: 2, local_batch: 4}\nepochs: 1\nlr: {base: 0.1}\n")
    job = job_of(Train(config=Path("run.yaml"), tag=["try"], name="one"), launched=False)
    (tmp_path / "run.yaml").unlink()
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert job.folder == Path("runs/one")
    assert job.facts["tags"] == ["try"]


def test_everyday_options_stand_for_fields(bigstep: Bigstep, tmp_path: Path) -> None:
    short = ["--lr", "0.3", "--batch", "24", "--workers", "4", "--seed", "7", "--model", "mlp", "--name", "mine"]
    more = ["--steps", "1", "--json", "--no-report", "--tag", "a", "--tag", "b"]
    result = fields(bigstep("train", *short, *more))
    run = read_run(tmp_path / "runs" / "mine")
    config = run.config
    assert (config["lr"]["base"], config["seed"], config["model"]) == (0.3, 7, "mlp")
    assert config["workers"] == {"count": 4, "local_batch": 6}
    assert (run.facts["name"], run.facts["tags"]) == ("mine", ["a", "b"])
    assert result["run"] == "runs/mine"
    status, _, err = bigstep("train", "--batch", "33")
    assert status == 2
    assert "a multiple of 32, the local batch: take 32" in err


def test_a_finished_run_stays_as_it_is_and_its_result_is_told_again(bigstep: Bigstep, tmp_path: Path) -> None:
    command = ["train", *QUICK, "--epochs", "0.004", "--out", "run"]
    first = fields(bigstep(*command))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    status, out, err = bigstep(*command, "--resume", "--seed", "0")
    assert status == 0
    assert json.loads(out) == first
    assert "is already finished; nothing was changed" in err
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_of_ranks_that_find_their_run_finished_the_first_tells(
    bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train", *QUICK, "--steps", "2", "--out", "run", "--resume")
    fields(bigstep(*words[:-1]))
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for rank in "01":
        for name, value in {**launched, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        status, out, err = bigstep(*words)
        assert (status, bool(out), bool(err)) == (0, rank == "0", rank == "0")


def test_a_sparse_model_is_not_trained_once_by_every_rank(bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    status, _, err = bigstep("train", "hogwild", "--data", "two.svm")
    assert (status, "in threads of one process: leave out torchrun" in err) == (2, True)


def test_a_run_that_steps_ended_goes_on_and_keeps_its_history(bigstep: Bigstep, tmp_path: Path) -> None:
    command = ["train", *QUICK, "--epochs", "0.01", "--out", "run"]
    fields(bigstep(*command, "--steps", "2"))
    started = read_run(tmp_path / "run").facts["started"]
    assert fields(bigstep(*command, "--steps", "4", "--resume"))["steps"] == 4
    facts = read_run(tmp_path / "run").facts
    assert facts["started"] == started
    assert [session["from_step"] for session in facts["sessions"]] == [0, 2]
    assert all({"started", "ranks", "hardware", "command"} <= set(session) for session in facts["sessions"])


def test_a_run_of_the_first_release_gets_its_first_session_when_it_goes_on(tmp_path: Path) -> None:
    RunWriter(tmp_path, {}, ranks=3).close()
    facts = json.loads((tmp_path / "run.json").read_text())
    del facts["sessions"]
    (tmp_path / "run.json").write_text(json.dumps(facts))
    RunWriter(tmp_path, {}, keep_until_step=5, ranks=2).close()
    assert [session["ranks"] for session in read_run(tmp_path).facts["sessions"]] == [3, 2]


def test_resume_finds_what_it_can_be_sure_of_and_refuses_the_rest(
    bigstep: Bigstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = bigstep("train", "--resume", "--out", "nothing-here")
    assert status == 2
    assert "--resume finds no run in nothing-here" in err
    status, _, err = bigstep("train", "sony", "--resume")
    assert status == 2
    assert "no unfinished run of sony-mini" in err
    for name in ("plain-mini", "plain-mini-2"):
        RunWriter(tmp_path / "runs" / name, {}).close()
    status, _, err = bigstep("train", "--resume")
    assert status == 2
    assert "2 unfinished runs (runs/plain-mini, runs/plain-mini-2); say which with --out" in err
    assert not (tmp_path / "nothing-here").exists()


def test_a_run_is_resumed_by_its_name_and_not_by_one_that_begins_alike(
    bigstep: Bigstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields(bigstep("train", *QUICK, "--steps", "1", "--name", "my run"))
    facts = json.loads((record := tmp_path / "runs" / "my-run" / "run.json").read_bytes())
    record.write_text(json.dumps({name: fact for name, fact in facts.items() if name != "result"}))
    RunWriter(tmp_path / "runs" / "my-runner", {}).close()
    for launched in (False, True):  # as a queue does that starts a job again with the same words
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value) if launched else monkeypatch.delenv(name, raising=False)
        again = fields(bigstep("train", "plain", *QUICK, "--steps", "2", "--name", "my run", "--resume"))
        assert (again["run"], again["steps"]) == ("runs/my-run", 2)
        record.write_text(json.dumps({k: v for k, v in json.loads(record.read_bytes()).items() if k != "result"}))


def test_ctrl_c_is_told(bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bigstep.plan.cli_result", interrupted)
    assert bigstep("plan") == (130, "", "bigstep: interrupted.\n")
    monkeypatch.setattr("bigstep.cli.resolve.job_of", lambda *_, **__: interrupted())
    assert bigstep("train")[2] == "bigstep: interrupted; a run that was under way continues with --resume.\n"


def test_the_help_of_bench_names_every_suite(bigstep: Bigstep) -> None:
    from bigstep.bench.suites import SUITES

    told = bigstep("bench", "--help")[1].partition("Arguments:")[2].partition("Options:")[0]
    assert set(SUITES) <= set(re.findall(r"\w+", told))


def test_a_scheduler_s_first_start_may_say_resume(bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert fields(bigstep("train", *QUICK, "--steps", "1", "--out", "run", "--resume"))["steps"] == 1


def test_a_recipe_s_name_in_a_file_leads_to_no_other_folder(bigstep: Bigstep, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "recipe: ../../esc/run\nworkers: {count: 2, local_batch: 4}\nepochs: 1\nlr: {base: 0.1}\nmodel: mlp\n"
    )
    result = fields(bigstep("train", "--config", "run.yaml", "--steps", "1", "--json", "--no-report"))
    assert result["run"] == "runs/esc-run-custom"


def test_two_threads_exclude_each_other_from_a_folder(tmp_path: Path) -> None:
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(ConfigError, match="Another run is writing") as refusal, locked(tmp_path / "run"):
            pass
        refused.append(str(refusal.value))

    with locked(tmp_path / "run"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert refused


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "thesis").read_text() == "mine"


def test_a_file_system_without_locks_is_not_taken_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def acquire(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    with pytest.raises(ConfigError, match=r"keeps no locks .*choose another with --out"), locked(tmp_path / "run"):
        pass


def test_a_run_that_began_between_the_look_and_the_lock_is_not_written_over(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run", {}).close()
    with pytest.raises(ConfigError, match="holds a run"), locked(tmp_path / "run", fresh=True):
        pass


def test_a_start_that_fails_leaves_no_empty_folder(bigstep: Bigstep, tmp_path: Path) -> None:
    status, _, err = bigstep("train", "--set", "model=yaml:nothing")
    assert status == 2, err
    assert not (tmp_path / "runs" / "plain-mini").exists()


def test_no_json_of_ours_holds_nan(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {"lr": {"base": float("inf")}})
    writer.add([{"kind": "train", "loss": float("nan"), "more": {"x": [float("nan")]}}])
    writer.finish({"loss": float("nan"), "accuracy": 0.5})
    for name in ("run.json", "metrics.jsonl"):
        text = (tmp_path / name).read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
    assert read_run(tmp_path).result == {"loss": None, "accuracy": 0.5}


def test_copies_that_run_side_by_side_are_told(tmp_path: Path) -> None:
    command = program("train", *QUICK, "--steps", "1")
    twins = [
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for folder in (tmp_path / "a", tmp_path / "b")
        if folder.mkdir() is None
    ]
    told = [twin.communicate(timeout=100)[1] for twin in twins]
    assert any("2 copies of this command run side by side" in err for err in told), told


def test_a_run_that_steps_end_is_described_by_them(bigstep: Bigstep) -> None:
    status, _, err = bigstep("train", *QUICK, "--steps", "2", "--epochs", "1")
    assert status == 0
    assert "at most 2 steps of 1 epoch · 1 rank ·" in err
    assert "step 2/2" in err
    assert " left" not in err.splitlines()[-1]
    _, _, err = bigstep("train", *QUICK, "--steps", "1", "--out", "one")
    assert " in all" in err.splitlines()[-1], "the first step is the last"


def test_help_is_quick_and_leaves_room_for_what_options_mean(bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = bigstep("train", "--help")
    assert status == 0
    options = out.partition("Options:")[2].splitlines()[1:]
    assert all(len(line) <= 80 for line in options)
    described = [line for line in options if line.strip().startswith("--")]
    assert all(len(line) - len(line[26:].lstrip()) <= 28 for line in described), "descriptions begin far to the right"
    names = [line.split()[0] for line in described]
    assert names[:7] == ["--lr", "--batch", "--workers", "--epochs", "--seed", "--model", "--data"]


def test_recipes_and_fields_are_completed(bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_BIGSTEP_COMPLETE", "complete_bash")

    def completed(line: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        return bigstep()[1].split()

    assert completed("bigstep train so") == ["sony"]
    assert completed("bigstep train --set optimizer.mo") == ["optimizer.momentum="]
    assert "check" in completed("bigstep ch")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_list_of_recipes_is_readable_on_a_terminal_of_any_width(
    bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    from bigstep.recipes import NAMES, describe

    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = bigstep("recipes")
    lines = out.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert len(lines) < 4 * len(NAMES) + 4
    words = " ".join(out.split())
    assert all(describe(name).summary.split()[0] in words for name in NAMES)
