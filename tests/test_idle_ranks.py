"""A stage with fewer workers than ranks: those that host workers train, the others wait and change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bigstep.config import ExchangeConfig, NormConfig, OptimizerConfig, RunConfig, Stage, WorkersConfig
from bigstep.config.edit import finish_on_one, make_exact
from bigstep.errors import ConfigError
from bigstep.records import read_run
from test_same_path import small_order, train_here, train_here_until
from worlds import World

GROWING = (Stage(epoch=1, count=2, local_batch=6), Stage(epoch=1.5, count=4, local_batch=3))
"""One worker, then two, then four in the middle of an epoch; each time a batch of 12."""


def growing(**changes: Any) -> RunConfig:
    """Begin with one, then more: 7 steps an epoch of the eighty images."""
    order = dataclasses.replace(
        small_order(1), workers=WorkersConfig(count=1, local_batch=12), plan=GROWING, epochs=3, evaluate_every=0.5
    )
    return dataclasses.replace(order, **changes)


CASES = {
    "lars": growing(),
    "last-batch statistics": growing(norm=NormConfig(statistics="last_batch")),
    "adamw on a torus": growing(
        optimizer=OptimizerConfig(name="adamw"), exchange=ExchangeConfig(collective="torus", grid=(2, 2))
    ),
    "no noise measured": growing(measure_noise=False),
    "shrinking": growing(
        workers=WorkersConfig(count=4, local_batch=3),
        plan=(Stage(epoch=0.5, count=3, local_batch=4), Stage(epoch=1.5, count=1, local_batch=12)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_path_does_not_depend_on_how_many_ranks_wait(
    name: str, world: Callable[[int], World], tmp_path: Path
) -> None:
    order = CASES[name]
    alone = train_here(dataclasses.replace(order, exchange=ExchangeConfig()), str(tmp_path / "1"))
    for ranks in (4,) if order.exchange.grid != "auto" else (2, 4):
        together = world(ranks).run(train_here, order, str(tmp_path / str(ranks)))
        assert len({rank["sha"] for rank in together}) == 1, "the ranks that waited end with other weights"
        assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-10)  # float64, 21 steps
        assert together[0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-10)
        for rank in together:
            torch.testing.assert_close(rank["mean"], alone["mean"], rtol=1e-10, atol=1e-12)
        evaluations = [[row["eval_loss"] for row in read_run(tmp_path / str(n)).evaluations] for n in (1, ranks)]
        assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-10)


def test_an_exact_run_has_the_same_bits_however_many_ranks_wait(world: Callable[[int], World], tmp_path: Path) -> None:
    order = make_exact(growing())
    assert len({world(n).run(train_here, order, str(tmp_path / str(n)))[0]["sha"] for n in (1, 2, 4)}) == 1


def test_one_that_finishes_sends_weights_for_evaluations_and_nothing_else(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    order = dataclasses.replace(finish_on_one(small_order(4), 2), evaluate_every=1)
    world(3).run(train_here, order, str(tmp_path))
    rows = read_run(tmp_path).train
    together, alone = ([row for row in rows if (row["epoch"] > 6) == late] for late in (False, True))
    assert (len(together), len(alone)) == (42, 54)
    assert all(row["bytes_sent"] > 0 for row in together)
    weights = 8 * (6 * 10 + 6 * 4 + 864 * 3 + 3 + 1)  # float64: conv, norm with its counter, head
    # before: a gradient of some 20 kB in each of 54 steps; one evaluation goes before the last epoch, over a tree of 2
    assert sum(row["bytes_sent"] for row in alone) == 2 * weights
    assert sum(row["bytes_sent"] == 0 for row in alone) == 53


def test_a_run_broken_off_in_any_stage_goes_on_with_the_same_bits(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    """Within the stage of one, of two, and where four begin."""
    whole = world(4).run(train_here_until, growing(), str(tmp_path / "whole"), 16, False)
    for steps in (4, 9, 11):
        folder = str(tmp_path / f"parts {steps}")
        world(4).run(train_here_until, growing(), folder, steps, False)
        parts = world(4).run(train_here_until, growing(), folder, 16, True)
        assert parts[0]["losses"] == whole[0]["losses"], f"broken off behind step {steps}"
        assert {rank["sha"] for rank in parts} == {rank["sha"] for rank in whole}
        assert torch.equal(parts[0]["mean"], whole[0]["mean"])


def test_a_stage_of_one_is_resumed_on_other_ranks(world: Callable[[int], World], tmp_path: Path) -> None:
    order = finish_on_one(small_order(4), 6)
    alone = train_here(order, str(tmp_path / "alone"), max_steps=30)
    world(4).run(train_here_until, order, str(tmp_path / "parts"), 20, False)  # 14 steps on four, then one trains
    world(2).run(train_here_until, order, str(tmp_path / "parts"), 25, True)
    parts = train_here(order, str(tmp_path / "parts"), max_steps=30, resume=True)
    assert parts["losses"] == pytest.approx(alone["losses"], rel=1e-10)


def test_what_a_lossy_codec_carries_is_handed_to_the_next_crew(world: Callable[[int], World], tmp_path: Path) -> None:
    order = growing(
        exchange=ExchangeConfig(collective="gather", codec="onebit"), optimizer=OptimizerConfig(), epochs=2.5,
        plan=(Stage(epoch=0.5, count=4, local_batch=3), Stage(epoch=1.5, count=2, local_batch=6)),
    )  # fmt: skip
    dense = train_here(order, str(tmp_path / "dense"))
    coded = world(4).run(train_here, order, str(tmp_path / "coded"))
    assert len({rank["sha"] for rank in coded}) == 1
    assert coded[0]["losses"][-1] < 1.5 * dense["losses"][-1]  # codes are rough; what they miss is not lost


def test_ranks_that_never_get_a_worker_are_refused(world: Callable[[int], World], tmp_path: Path) -> None:
    order = growing(plan=GROWING[:1])
    assert world(3).run(refusal, order, str(tmp_path))[0].startswith("3 ranks were started for 2 workers")


def refusal(order: RunConfig, folder: str) -> str:
    try:
        train_here(order, folder)
    except ConfigError as error:
        return str(error)
    return "nothing was said"
