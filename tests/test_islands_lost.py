"""Islands that are lost: a run goes on from the last meeting, on any ranks, with or without what they had kept."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from bigstep import recipes
from bigstep.config.text import apply_settings
from bigstep.engine import elastic
from bigstep.engine.elastic import _newest, _shrink
from bigstep.engine.job import Job
from bigstep.engine.launch import RankProcesses
from bigstep.engine.meetings import forget_meetings
from bigstep.engine.ranks import AgreedError
from bigstep.engine.rates import Rates
from bigstep.records import read_run
from bigstep.train import fit
from test_islands import ADAMW, DILOCO, METHODS, close, config, data, path_of
from worlds import World

KEPT = ("checkpoint.meetings=true", "checkpoint.seconds=0")
"""Nothing but what islands keep: no checkpoint before the end."""


def break_off(folder: str, at: int, *settings: str, run: Callable[..., Any] = path_of) -> None:
    """Let all ranks end when a step begins, as if they had been killed."""
    go_on = Rates.set

    def until(self: Rates, step: Any) -> float:
        if step.position.step == at:
            raise AgreedError("broken off")
        return go_on(self, step)

    with mock.patch.object(Rates, "set", until), pytest.raises(AgreedError):
        run(folder, *settings)


def go_on(folder: str, *settings: str) -> dict[str, Any]:
    return path_of(folder, *settings, resume=True)


@pytest.mark.parametrize("method", ["DiLoCo with AdamW", "streaming", "1 bit", "post-local"])
def test_a_run_goes_on_from_the_last_meeting_as_if_nothing_had_been_lost(tmp_path: Path, method: str) -> None:
    settings, folder = (*METHODS[method], *KEPT), tmp_path / "lost"
    whole = path_of(str(tmp_path / "whole"), *settings)
    break_off(str(folder), 7, *settings)
    assert not (folder / "checkpoints").exists()
    assert go_on(str(folder), *settings) == whole
    met = {"streaming": 7, "post-local": 6}.get(method, 6)  # three steps a epoch; islands begin behind the fifth
    assert f"Resumed at step {met}." in read_run(folder).notes
    assert not (folder / "meetings").exists(), "the last checkpoint holds all of it"


def test_other_ranks_go_on_from_what_each_has_kept(world: Callable[[int], World], tmp_path: Path) -> None:
    settings = ("islands.count=4", "islands.every=2", DILOCO, ADAMW, "lr.base=0.003", *KEPT)
    whole = path_of(str(tmp_path / "whole"), *settings)
    for before, after in ((4, 2), (2, 4)):
        folder = tmp_path / f"{before} to {after}"
        world(before).run(break_off, str(folder), 5, *settings)
        assert len(list((folder / "meetings").iterdir())) == before
        close(world(after).run(go_on, str(folder), *settings)[0], whole)
        assert "Resumed at step 4." in read_run(folder).notes


def test_an_island_that_spans_ranks_goes_on_on_one(world: Callable[[int], World], tmp_path: Path) -> None:
    settings = ("islands.count=2", "islands.every=2", *KEPT)
    whole, folder = path_of(str(tmp_path / "whole"), *settings), tmp_path / "lost"
    world(4).run(break_off, str(folder), 5, *settings)
    close(world(2).run(go_on, str(folder), *settings)[0], whole)
    assert "Resumed at step 4." in read_run(folder).notes


def plain(folder: str, *settings: str, resume: bool = False) -> dict[str, Any]:
    """A run whose islands hold nothing but weights, which are the agreed ones behind a meeting."""
    bare = nn.Sequential(nn.Flatten(), nn.Linear(108, 4)).double()
    nn.init.constant_(bare[1].weight, 0.01)
    nn.init.zeros_(bare[1].bias)
    shape = ("islands.count=4", "islands.every=3", "optimizer.momentum=0", *KEPT)
    result = fit(config(*shape, *settings), bare, (data(), data()), out=folder, resume=resume, device="cpu")
    losses = [row["loss"] for row in read_run(Path(folder)).train] if Path(folder, "run.json").exists() else []
    return {"losses": losses, "eval": result.facts["eval_loss"], "sha": result.weights_sha256}


def plain_again(folder: str, *settings: str) -> dict[str, Any]:
    return plain(folder, *settings, resume=True)


def break_plain_off(folder: str, at: int, *settings: str) -> None:
    break_off(folder, at, *settings, run=plain)


def lose(folder: Path, *islands: str) -> None:
    """Take away what some ranks have kept, as a machine does that is gone."""
    for name in islands:
        for file in (folder / "meetings" / name).iterdir():
            file.unlink()


def test_an_island_without_files_comes_back_with_the_agreed_weights(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    whole, folder = plain(str(tmp_path / "whole")), tmp_path / "lost"
    world(2).run(break_plain_off, str(folder), 8)
    lose(folder, "2-4")
    # it has met at step 6 and holds nothing else, so that what was agreed on is all that it had
    ended = world(2).run(plain_again, str(folder))
    close(ended[0], whole, within=1e-12)
    assert ended[0]["sha"] == ended[1]["sha"]
    told = "Islands 2, 3 have lost what was kept of the last meeting, and went on from the agreed weights."
    assert told in read_run(folder).notes


def test_an_exact_run_goes_back_to_where_all_islands_are(world: Callable[[int], World], tmp_path: Path) -> None:
    exact = ("exact=true", "exchange.codec=exact", "islands.codec=exact", "optimizer.momentum=0.9")
    whole, folder = plain(str(tmp_path / "whole"), *exact), tmp_path / "lost"
    world(2).run(break_plain_off, str(folder), 8, *exact)
    lose(folder, "2-4")
    assert plain_again(str(folder), *exact)["sha"] == whole["sha"]
    assert "Nothing to resume: started anew." in read_run(folder).notes
    kept = tmp_path / "kept"
    world(2).run(break_plain_off, str(kept), 8, *exact)
    assert plain_again(str(kept), *exact)["sha"] == whole["sha"], "one rank does the steps of both"
    assert "Resumed at step 6." in read_run(kept).notes


def test_a_torn_file_is_passed_over_for_the_meeting_before(tmp_path: Path) -> None:
    whole, folder = plain(str(tmp_path / "whole")), tmp_path / "lost"
    break_plain_off(str(folder), 8)
    newest = max((folder / "meetings" / "0-4").iterdir())
    newest.write_bytes(newest.read_bytes()[:-9])
    assert plain_again(str(folder)) == whole
    assert "Resumed at step 3." in read_run(folder).notes


def test_whoever_restarts_ranks_names_the_islands_and_looks_at_meetings(tmp_path: Path) -> None:
    dead = subprocess.Popen(["sleep", "60"])
    dead.kill()
    dead.wait()
    living = subprocess.Popen([sys.executable, "-c", ""])
    living.wait()
    four = RankProcesses([living, living, living, dead], tmp_path).killed()
    assert four == [3]
    sentence = "Rank 3 with island 6, 7 was lost; going on with 3 of 4 ranks from the last meeting."
    assert _shrink(four, 4, islands=8) == (3, sentence)
    assert _shrink(four, 4, islands=8, apart=True)[1].endswith(
        "going on with 3 of 4 ranks from where the others stand."
    )
    assert _shrink(four, 4, islands=2)[0] == 2, "two islands do not fit on three ranks"
    assert _shrink(four, 4, islands=1) == (3, "Rank 3 was lost; going on with 3 of 4 ranks from the last checkpoint.")
    (tmp_path / "meetings" / "0-1").mkdir(parents=True)
    (tmp_path / "meetings" / "0-1" / "step-000000030.ckpt").touch()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-000000020.ckpt").touch()
    assert _newest(tmp_path) == "step-000000030.ckpt"


def test_what_a_run_has_yet_to_come_to_is_forgotten_and_nothing_else(tmp_path: Path) -> None:
    kept = tmp_path / "meetings" / "0-2"
    kept.mkdir(parents=True)
    for name in ("step-000000010.ckpt", "step-000000020.ckpt", "mine.txt"):
        (kept / name).touch()
    forget_meetings(tmp_path, behind=10)
    assert sorted(path.name for path in kept.iterdir()) == ["mine.txt", "step-000000010.ckpt"]
    forget_meetings(tmp_path)
    assert [path.name for path in kept.iterdir()] == ["mine.txt"]
    (kept / "mine.txt").unlink()
    forget_meetings(tmp_path)
    assert not (tmp_path / "meetings").exists()


def test_a_rank_that_is_killed_when_all_is_done_starts_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    @contextlib.contextmanager
    def started(procs: int, job: Any) -> Iterator[RankProcesses]:
        starts.append(procs)
        ranks = [subprocess.Popen(["true"]), subprocess.Popen(["sh", "-c", "kill -KILL $$"])]
        assert [rank.wait() for rank in ranks] == [0, -9]
        yield RankProcesses(ranks, tmp_path)

    monkeypatch.setattr(elastic, "started", started)
    assert elastic.launch_elastic(2, mock.Mock(folder=tmp_path)) == 0
    assert starts == [2]


def test_ranks_that_are_asked_to_save_themselves_when_all_is_done_start_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[list[subprocess.Popen[bytes]]] = []
    told = [  # what two ranks do: one is lost at first; then the first is done, and the other leaves as it is asked to
        ["exec sleep 60", "kill -KILL $$"],
        ["trap 'exit 0' TERM; touch ready-0; while :; do sleep 0.02; done",
         "trap 'exit 143' TERM; touch ready-1; while :; do sleep 0.02; done"],
    ]  # fmt: skip

    @contextlib.contextmanager
    def started(procs: int, job: Any) -> Iterator[RankProcesses]:
        ranks = [subprocess.Popen(["sh", "-c", words], cwd=tmp_path) for words in told[len(starts)]]
        starts.append(ranks)
        if len(starts) == 2:  # a checkpoint, once both would hear a signal
            while len(list(tmp_path.glob("ready-*"))) < 2:
                assert all(rank.poll() is None for rank in ranks)
            (tmp_path / "checkpoints").mkdir()
            (tmp_path / "checkpoints" / "step-00000001.ckpt").touch()
        try:
            yield RankProcesses(ranks, tmp_path)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()

    monkeypatch.setattr(elastic, "started", started)
    job = Job(config=recipes.load("plain", "mini"), folder=tmp_path)
    assert elastic.launch_elastic(2, job) == 0
    assert [[rank.returncode for rank in ranks] for ranks in starts] == [[-9, -9], [0, 143]]


def test_ranks_that_are_left_do_not_take_the_grid_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[tuple[int, Any]] = []

    @contextlib.contextmanager
    def started(procs: int, job: Any) -> Iterator[RankProcesses]:
        starts.append((procs, job.config.exchange.grid))
        words = ["exec sleep 60", "exec sleep 60", "kill -KILL $$"] if len(starts) == 1 else ["true", "true"]
        ranks = [subprocess.Popen(["sh", "-c", each]) for each in words]
        try:
            yield RankProcesses(ranks, tmp_path)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()

    monkeypatch.setattr(elastic, "started", started)
    config = apply_settings(recipes.load("plain", "mini"), ["exchange.collective=torus", "exchange.grid=[3, 1]"])
    assert elastic.launch_elastic(3, Job(config=config, folder=tmp_path)) == 0
    assert starts == [(3, (3, 1)), (2, "auto")]


def test_the_launcher_looks_for_meetings_while_a_rank_removes_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, removed = tmp_path / "meetings" / "0-1", tmp_path / "meetings" / "1-2"
    for place in (kept, removed):
        place.mkdir(parents=True)
    (kept / "step-000000007.ckpt").touch()
    look = os.scandir

    def look_too_late(path: Any = ".") -> Any:
        if Path(path) == removed and removed.exists():
            forget_meetings(tmp_path, behind=7)
            assert not removed.exists()
        return look(path)

    monkeypatch.setattr(os, "scandir", look_too_late)
    assert _newest(tmp_path) == "step-000000007.ckpt"
    assert not removed.exists()
