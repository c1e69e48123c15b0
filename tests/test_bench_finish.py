"""`--finish-on-one`: the last epochs run on one worker, on the same path whether or not ranks are left without work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bigstep.config.edit import finish_on_one
from bigstep.records import read_run
from test_same_path import small_order, train_here
from worlds import World


def test_ranks_without_workers_leave_the_path_as_it_is(world: Callable[[int], World], tmp_path: Path) -> None:
    order = finish_on_one(small_order(4), 2)
    alone = train_here(order, str(tmp_path / "alone"))
    together = world(3).run(train_here, order, str(tmp_path / "together"))
    batches = [row["batch"] for row in read_run(tmp_path / "alone").train]
    assert (batches[0], batches[-27], set(batches[-26:])) == (12, 3, {3, 2})  # 80 images: 27 steps an epoch on one
    assert len({rank["sha"] for rank in together}) == 1
    # float64: orders of summation differ at 1e-16, which a path of 90 steps lets grow
    assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert together[0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-9)
