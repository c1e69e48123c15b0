"""Ranks divide the work of Muon's updates: each does its share, and the run takes the path of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigstep.config import CheckpointConfig, IslandsConfig, LrConfig, OptimizerConfig, RunConfig, Stage, WorkersConfig
from bigstep.config.edit import make_exact
from bigstep.engine.methods import build
from bigstep.engine.methods.graphed import Graphed
from bigstep.optim import orthogonal
from bigstep.records import read_run
from bigstep.train import fit
from test_same_path import Eighty, small_order, train_here
from worlds import World

STEPS = 12


def order(**changes: Any) -> RunConfig:
    muon = OptimizerConfig(name="muon", momentum=0.9, renormalise=True, rest="sgd", rest_lr=2.0)
    base = dataclasses.replace(
        small_order(7), optimizer=muon, lr=LrConfig(base=0.05, scaling="none"), checkpoint=CheckpointConfig(every=0.4)
    )
    return dataclasses.replace(base, **changes)


def train(order: RunConfig, folder: str, steps: int = STEPS, resume: bool = False) -> dict[str, Any]:
    """Train and count the matrices that this rank orthogonalised."""
    count, plain = 0, orthogonal.orthogonalise

    def counted(matrices: torch.Tensor, iterations: int) -> torch.Tensor:
        nonlocal count
        count += len(matrices)
        return plain(matrices, iterations)

    orthogonal.orthogonalise = counted
    try:
        return {**train_here(order, folder, max_steps=steps, resume=resume), "matrices": count}
    finally:
        orthogonal.orthogonalise = plain


def test_ranks_share_the_matrices_and_take_one_path(world: Callable[[int], World], tmp_path: Path) -> None:
    alone = train(order(), str(tmp_path / "1"))
    assert alone["matrices"] == STEPS  # the convolution; the head is of the rest
    for ranks in (2, 3):
        together = world(ranks).run(train, order(), str(tmp_path / str(ranks)))
        assert [each["matrices"] for each in together] == [STEPS] + [0] * (ranks - 1)
        assert len({each["sha"] for each in together}) == 1
        # float64: sums over ranks have another order, and the difference grows along the path
        assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-10)


def test_all_do_all_where_sharing_is_off_or_bits_count(world: Callable[[int], World], tmp_path: Path) -> None:
    off = dataclasses.replace(order().optimizer, share=False)
    exact = make_exact(order(precision="float32"))
    for name, asked in (("off", order(optimizer=off)), ("exact", exact)):
        together = world(2).run(train, asked, str(tmp_path / name), 3)
        assert [each["matrices"] for each in together] == [3, 3]


def test_a_resumed_run_that_shares_gives_the_same_bits(world: Callable[[int], World], tmp_path: Path) -> None:
    whole = world(3).run(train, order(), str(tmp_path / "whole"))
    world(3).run(train, order(), str(tmp_path / "parts"), 7)
    parts = world(3).run(train, order(), str(tmp_path / "parts"), STEPS, True)
    assert {each["sha"] for each in parts} == {each["sha"] for each in whole}
    assert parts[0]["losses"] == whole[0]["losses"]


def test_the_ranks_of_an_island_share_and_those_of_another_do_not_wait(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    islands = order(workers=WorkersConfig(count=8, local_batch=2), islands=IslandsConfig(count=2, every=3))
    alone = train(islands, str(tmp_path / "1"))
    together = world(4).run(train, islands, str(tmp_path / "4"))
    assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-10)
    assert [each["matrices"] for each in together] == [STEPS, 0, STEPS, 0]


def train_on(order: RunConfig, folder: str, graphs: bool) -> list[float]:
    """Train without dropout; with `graphs` as on GPUs, where a rank that shares its steps with nobody has them."""

    def emulated(*pieces: Any, **settings: Any) -> Graphed:
        return Graphed(*pieces, **{**settings, "emulate": True})

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(864, 3))
    with pytest.MonkeyPatch.context() as patch:
        if graphs:
            patch.setattr(build, "_takes_graphs", lambda setting, ranks: ranks.size == 1)
            patch.setattr(build, "Graphed", emulated)
        fit(order, model, (Eighty(), Eighty()), out=folder, device="cpu", max_steps=STEPS)
    return [row["loss"] for row in read_run(Path(folder)).train] if Path(folder, "run.json").exists() else []


@pytest.mark.parametrize("alone", ["islands", "one worker"])
def test_a_rank_that_goes_on_by_itself_with_graphs_asks_no_other_for_its_share(
    alone: str, world: Callable[[int], World], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"plan": (Stage(epoch=1, count=1, local_batch=12),)}
    if alone == "islands":
        changes = {"islands": IslandsConfig(count=2, every=3, begin=1)}
    asked = order(workers=WorkersConfig(count=4, local_batch=6), **changes)
    plain, graphs = (world(2).run(train_on, asked, str(tmp_path / str(each)), each)[0] for each in (False, True))
    assert len(plain) == STEPS
    assert graphs == pytest.approx(plain, rel=1e-10)  # float64, other orders of sums along the path
