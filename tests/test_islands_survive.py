"""When a rank is lost, the islands of the others stay where they are; the lost one comes back with what was agreed."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import bigstep.train
from bigstep.engine.checkpoint import load_checkpoint, save_checkpoint
from bigstep.engine.islands_of import APART
from bigstep.engine.meter import Meter
from bigstep.engine.methods.islands import Islands
from bigstep.engine.methods.meeting import Meeting
from bigstep.engine.methods.rounds import Rounds
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.ranks import AgreedError
from bigstep.engine.rates import Rates
from bigstep.errors import RunError
from bigstep.records import read_run
from test_islands_lost import plain
from worlds import Pool, World

GONE = "Connection closed by peer"
CODES = ("none", "int8")
FULL = (1, 2, 4, 5, 7, 8)
"""Steps that all islands have samples in; the last of three has some for the first island alone."""


@contextmanager
def counted() -> Iterator[Counter[tuple[int, int]]]:
    """Count the steps that islands take, by number of their first worker and of the step."""
    taken: Counter[tuple[int, int]] = Counter()
    step = Synchronous.step

    def count(self: Synchronous, part: Any, batches: Any) -> Any:
        taken[part.first_worker // 4, part.position.step + 1] += 1
        return step(self, part, batches)

    with mock.patch.object(Synchronous, "step", count):
        yield taken


def fail(
    rank: int, folder: str, lost: int, in_meeting: tuple[int, ...], at: int, *settings: str, run: Any = plain
) -> Any:
    """Train until the flush behind step `at`, where all ranks miss the lost one; some do so in the meeting before."""
    go_on, wait = Meter.flush, Meeting.wait

    def flush(self: Meter, *others: Any, **more: Any) -> Any:
        if self._taken[-1].step.position.step + 1 == at:
            raise AgreedError("killed") if rank == lost else RuntimeError(GONE)
        return go_on(self, *others, **more)

    def arrive(self: Meeting) -> Any:
        mean = wait(self)  # so that the others have theirs
        if rank in in_meeting and Rounds.now == at:  # type: ignore[attr-defined]
            raise AgreedError("killed") if rank == lost else RuntimeError(GONE)
        return mean

    meet = Rounds.after_step

    def now(self: Rounds) -> bool:
        Rounds.now = self.steps + 1  # type: ignore[attr-defined]
        return meet(self)

    with ExitStack() as stack:
        taken = stack.enter_context(counted())
        for owner, name, new in ((Meter, "flush", flush), (Meeting, "wait", arrive), (Rounds, "after_step", now)):
            stack.enter_context(mock.patch.object(owner, name, new))
        # every step is told, whatever the clock says
        stack.enter_context(mock.patch("bigstep.engine.meter._MOST_STEPS_BETWEEN_FLUSHES", 1))
        stack.enter_context(mock.patch("time.sleep"))  # nobody is silent: no need to listen for signs of life
        stack.enter_context(pytest.raises(RunError))
        run(folder, *settings)
    return dict(taken)


def fail_as_ranks(*arguments: Any) -> Any:
    import torch.distributed as dist

    return fail(dist.get_rank(), *arguments)


def from_survivors(folder: str, *settings: str) -> Any:
    """Go on as a launcher does that has seen a rank end."""
    with mock.patch.object(bigstep.train, "Order", functools.partial(bigstep.train.Order, survivors=True)):
        return plain(folder, *settings, resume=True)


def go_on(folder: str, *settings: str) -> Any:
    with counted() as taken:
        return from_survivors(folder, *settings), dict(taken)


def reset_at(folder: str, at: int, islands: tuple[int, ...], *settings: str) -> Any:
    """A run on one rank whose islands are brought back to what was agreed, when so many steps were taken."""
    step = Islands.step

    def reset(self: Islands, now: Any, batches: Any) -> Any:
        if now.position.step == at:
            for island in (each for each in self.islands if each.number in islands):
                for number in range(len(self.rounds.outer.fragments)):
                    self.rounds.outer.hand_out(number, island.weights)
                island.samples = [0] * len(island.samples)
        return step(self, now, batches)

    with mock.patch.object(Islands, "step", reset):
        return plain(folder, *settings)


def same(ended: dict[str, Any], wanted: dict[str, Any], *, rows: slice = slice(None)) -> None:
    """The order of sums differs, nothing else: float64 rounds at 1e-16."""
    assert len(ended["losses"]) == len(wanted["losses"]) == 9, "every row is there once"
    assert ended["losses"][rows] == pytest.approx(wanted["losses"][rows], rel=1e-12)
    assert ended["eval"] == pytest.approx(wanted["eval"], rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_survivors_take_no_step_twice_and_the_lost_island_comes_back(
    world: Callable[[int], World], tmp_path: Path, ranks: int
) -> None:
    folder = tmp_path / "run"
    before = world(2).run(fail_as_ranks, str(folder), 1, (), 8)
    ended = world(ranks).run(go_on, str(folder)) if ranks > 1 else [go_on(str(folder))]
    same(ended[0][0], reset_at(str(tmp_path / "reset"), 7, (2, 3)))
    taken = sum((Counter(each) for each in (before[0], *(after for _, after in ended))), Counter())
    survived = {key: count for key, count in taken.items() if key[0] < 2}
    assert survived == {(0, step): 1 for step in range(1, 10)} | {(1, step): 1 for step in FULL}, "they stand at step 8"
    assert [key for key in taken if key[0] == 3] == [(3, 8)], "from the last row on"
    told = read_run(folder).notes
    assert "Resumed at step 7." in told
    assert (
        "Islands 2, 3 came back at step 7 with the weights agreed on at step 6; lost: 1 step. "
        "The others go on from step 8 and have lost none."
    ) in told
    assert not (folder / "meetings").exists()


@pytest.mark.parametrize("codec", CODES)
def test_a_meeting_that_some_have_held_is_held_for_all(
    world: Callable[[int], World], tmp_path: Path, codec: str
) -> None:
    folder, settings = tmp_path / "run", (f"islands.codec={codec}",)
    world(4).run(fail_as_ranks, str(folder), 3, (2,), 6, *settings)
    ended = world(4).run(go_on, str(folder), *settings)
    whole = plain(str(tmp_path / "whole"), *settings)
    if codec == "none":  # what the lost island moved was in it, and its weights are what was agreed on
        same(ended[0][0], whole, rows=slice(6, None))
    else:  # its code owes what it missed before the meeting, and not what it missed there
        assert ended[0][0]["eval"] == pytest.approx(whole["eval"], rel=1e-3)
    assert ended[0][1] == {(0, step): 1 for step in (7, 8, 9)}, "step 6 was taken and met"
    assert "lost: 0 steps." in " ".join(read_run(folder).notes)


@pytest.mark.parametrize("codec", CODES)
def test_a_meeting_that_nobody_could_hold_is_held_again(
    world: Callable[[int], World], tmp_path: Path, codec: str
) -> None:
    folder, settings = tmp_path / "run", (f"islands.codec={codec}",)
    world(2).run(fail_as_ranks, str(folder), 1, (0, 1), 6, *settings)
    ended = world(2).run(go_on, str(folder), *settings)
    same(ended[0][0], reset_at(str(tmp_path / "reset"), 5, (2, 3), *settings))
    assert sorted(ended[0][1]) == [(0, 7), (0, 8), (0, 9), (1, 7), (1, 8)]


def test_islands_that_are_ahead_stay_so_if_another_rank_is_lost_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    taken = [fail(0, str(folder), 1, (), 8)]
    (apart,) = folder.glob(APART)
    share = load_checkpoint(apart)  # as where rows were told seldom: the run comes to step 8 in three steps
    share["islands"]["recorded"] = [{"epoch": 1, "offset": 128, "step": 5}]
    save_checkpoint(apart.parent, 8, share, keep=1)
    taken.append(fail(0, str(folder), 1, (), 6, run=from_survivors))
    ended, rest = go_on(str(folder))
    assert Counter(taken[0]) + Counter(taken[1]) + Counter(rest) == counts_of(tmp_path)
    same(ended, plain(str(tmp_path / "whole")))


def test_what_is_kept_in_the_first_step_behind_a_resume_tells_where_it_stands(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fail(0, str(folder), 1, (), 8)
    broken = mock.patch.object(Synchronous, "step", side_effect=RuntimeError(GONE))
    with broken, mock.patch("time.sleep"), pytest.raises(RunError):
        plain(str(folder), resume=True)
    (apart,) = folder.glob(APART)
    kept = load_checkpoint(apart)["islands"]
    assert (kept["taken"], kept["steps"]) == (6, 6), "they have been islands from the beginning"


def counts_of(tmp_path: Path) -> Counter[tuple[int, int]]:
    """The steps that islands take in a run that nothing breaks off."""
    with counted() as taken:
        plain(str(tmp_path / "counted"))
    return taken


def die_at(folder: str, at: int) -> str:
    """Train as one of two ranks, of which one is killed when a step begins; return what the other says."""
    import torch.distributed as dist

    go_on = Rates.set

    def until(self: Rates, step: Any) -> float:
        if step.position.step == at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return go_on(self, step)

    with mock.patch.object(Rates, "set", until), pytest.raises(RunError) as raised:
        plain(folder)
    return str(raised.value)


def test_a_rank_that_is_killed_takes_no_other_islands_with_it(tmp_path: Path) -> None:
    folder, pool = tmp_path / "run", Pool()
    try:
        pool.world(2)
        for _, connection in pool.ranks:
            connection.send(("run", die_at, (str(folder), 7)))
        assert pool.ranks[0][1].poll(30)
        assert "failed at step " in pool.ranks[0][1].recv()[1]
    finally:
        pool.replace()
    ended, taken = go_on(str(folder))
    assert len(ended["losses"]) == 9
    told = re.search(r"The others go on from step (\d+) and have lost none", " ".join(read_run(folder).notes))
    assert told, read_run(folder).notes
    assert int(told[1]) >= 7, "all have taken that"
    assert sorted(step for island, step in taken if island == 0) == list(range(int(told[1]) + 1, 10))


def test_islands_whose_meetings_are_on_their_way_go_back_to_the_last_one(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    folder, settings = tmp_path / "run", ("islands.overlap=1",)
    world(2).run(fail_as_ranks, str(folder), 1, (), 8, *settings)
    assert not list(folder.glob("meetings/*/apart/*"))
    same(world(2).run(go_on, str(folder), *settings)[0][0], plain(str(tmp_path / "whole"), *settings))
    assert "Resumed at step 7." in read_run(folder).notes


def test_without_a_launcher_that_saw_a_loss_a_run_goes_back_to_the_meeting(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    world(2).run(fail_as_ranks, str(folder), 1, (), 8)
    assert len(list(folder.glob("meetings/*/apart/*"))) == 1
    same(plain(str(folder), resume=True), plain(str(tmp_path / "whole")))
    assert "Resumed at step 6." in read_run(folder).notes
