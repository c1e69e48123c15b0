"""The heart of the design: the same run takes the same path on any number of ranks, interrupted or not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigstep.config import (
    DataConfig,
    ExchangeConfig,
    IslandsConfig,
    LrConfig,
    NormConfig,
    OptimizerConfig,
    Piece,
    RunConfig,
    WorkersConfig,
)
from bigstep.recipes import load
from bigstep.records import read_run
from bigstep.train import fit
from worlds import World

STEPS = 30


def config(workers: int = 8, **changes: Any) -> RunConfig:
    """30 steps of the small residual network on embedded images, batch norm and augmentation included."""
    base = RunConfig(
        recipe="test",
        model="small",
        data=DataConfig(augment="crop_flip", holdout=0.95),
        workers=WorkersConfig(count=workers, local_batch=4),
        epochs=4,
        lr=LrConfig(base=0.1, scaling="none", schedule=(Piece(shape="warmup", until=1, start=0.1),)),
        optimizer=OptimizerConfig(name="lars", trust_coefficient=0.02, weight_decay=1e-4),
        norm=NormConfig(zero_gamma=True),
        evaluate_every=100,
    )
    return dataclasses.replace(base, **changes)


class Eighty(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Eighty small images: an epoch of 8 workers x 3 ends with an incomplete batch of 8 samples."""

    classes = ("a", "b", "c")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(80, 1, 12, 12, generator=generator, dtype=torch.float64)
        self.labels = (self.images.mean((1, 2, 3)) * 40).round().long().remainder(3)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


def train_here(order: RunConfig, folder: str, **arguments: Any) -> dict[str, Any]:
    """Train on the ranks of this world (or alone) on eighty images, with dropout, and return losses and weights."""
    data = Eighty()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(864, 3)
    )
    result = fit(order, model, (data, data), out=folder, device="cpu", **arguments)
    rows = read_run(Path(folder)).train if Path(folder, "run.json").exists() else []
    return {
        "losses": [row["loss"] for row in rows],
        "sha": result.weights_sha256,
        "accuracy": result.accuracy,
        "eval_loss": result.facts["eval_loss"],
        "mean": model[1].running_mean.clone(),
    }


def small_order(workers: int, precision: str = "float64") -> RunConfig:
    return dataclasses.replace(
        config(workers, precision=precision, epochs=8),
        workers=WorkersConfig(count=workers, local_batch=3),
        data=DataConfig(loaders=0),
    )


# float64 rounds at 1e-16 and the difference of two orders of summation grows along 30 steps of a curved path; float32
# starts from 1e-7 and grows the same way
BOUNDS = {"float64": 1e-10, "float32": 1e-4}


@pytest.mark.parametrize(
    ("workers", "precision", "worlds"),
    [(8, "float64", (2, 3, 4)), (7, "float64", (3, 4)), (8, "float32", (3,)), (7, "float32", (2,))],
)
def test_losses_do_not_depend_on_the_number_of_ranks(
    world: Callable[[int], World], tmp_path: Path, workers: int, precision: str, worlds: tuple[int, ...]
) -> None:
    order = small_order(workers, precision)
    alone = train_here(order, str(tmp_path / "1"), max_steps=STEPS)
    assert len(alone["losses"]) == STEPS
    for ranks in worlds:
        together = world(ranks).run(train_here_steps, order, str(tmp_path / str(ranks)))
        assert len({result["sha"] for result in together}) == 1, "ranks ended with different weights"
        for mine, theirs in zip(alone["losses"], together[0]["losses"], strict=True):
            assert mine == pytest.approx(theirs, rel=BOUNDS[precision])
        assert together[0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=BOUNDS[precision])
        for result in together:
            torch.testing.assert_close(result["mean"], alone["mean"], rtol=BOUNDS[precision], atol=1e-6)


def train_here_steps(order: RunConfig, folder: str) -> dict[str, Any]:
    return train_here(order, folder, max_steps=STEPS)


def test_the_small_network_on_embedded_images_takes_the_same_path(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    order = config(precision="float64", data=DataConfig(augment="crop_flip"))
    alone = fit(order, out=tmp_path / "1", device="cpu", max_steps=8)
    together = world(2).run(fit_embedded, order, str(tmp_path / "2"), 8)
    one = [row["loss"] for row in read_run(tmp_path / "1").train]
    two = [row["loss"] for row in read_run(tmp_path / "2").train]
    assert one == pytest.approx(two, rel=1e-10)
    assert together[0][1] == pytest.approx(alone.facts["eval_loss"], rel=1e-10)


@pytest.mark.parametrize("precision, steps", [("float64", 3), ("float32", 12)])
def test_ranks_agree_at_awkward_sizes_as_far_as_the_readme_says(
    world: Callable[[int], World], tmp_path: Path, precision: str, steps: int
) -> None:
    readme = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    told = re.search(r"In float64 .* ranks agree to (\S+)\. In float32 .* \(to some (\S+) within a dozen steps", readme)
    assert told, "the README says how far losses agree, in both precisions"
    # some 1e-4 is an order of magnitude, seen as 1.8e-4
    bound = float(told[1]) if precision == "float64" else 10 * float(told[2])
    workers = WorkersConfig(count=7, local_batch=33)
    order = dataclasses.replace(load("plain"), workers=workers, precision=precision, evaluate_every=100)
    fit(order, out=tmp_path / "1", device="cpu", max_steps=steps)
    world(2).run(fit_embedded, order, str(tmp_path / "2"), steps)
    one, two = ([row["loss"] for row in read_run(tmp_path / name).train] for name in "12")
    assert len(one) == steps
    assert one == pytest.approx(two, rel=bound)


def fit_embedded(order: RunConfig, folder: str, steps: int) -> tuple[str, float]:
    result = fit(order, out=folder, device="cpu", max_steps=steps)
    return result.weights_sha256, result.facts["eval_loss"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_resuming_in_the_middle_of_an_epoch_gives_the_same_bits(
    world: Callable[[int], World], tmp_path: Path, ranks: int
) -> None:
    order = dataclasses.replace(small_order(7), checkpoint=dataclasses.replace(config().checkpoint, every=0.4))
    whole = world(ranks).run(train_here_until, order, str(tmp_path / "whole"), 20, False)
    world(ranks).run(train_here_until, order, str(tmp_path / "parts"), 9, False)
    parts = world(ranks).run(train_here_until, order, str(tmp_path / "parts"), 20, True)
    assert {result["sha"] for result in parts} == {result["sha"] for result in whole}
    assert parts[0]["losses"] == whole[0]["losses"]


def train_here_until(order: RunConfig, folder: str, steps: int, resume: bool) -> dict[str, Any]:
    return train_here(order, folder, max_steps=steps, resume=resume)


ON_ITS_WAY = {
    "a gradient": {"exchange": ExchangeConfig(collective="gather", codec="onebit", double_buffer=True)},
    "a meeting": {"islands": IslandsConfig(count=2, every=5)},
}


@pytest.mark.parametrize("kind", ON_ITS_WAY)
def test_steps_that_stop_a_run_change_nothing_of_its_way(
    world: Callable[[int], World], tmp_path: Path, kind: str
) -> None:
    order = dataclasses.replace(small_order(4), **ON_ITS_WAY[kind])  # type: ignore[arg-type]
    parts = str(tmp_path / "parts")
    whole = world(2).run(train_here_until, order, str(tmp_path / "whole"), 12, False)
    stopped = world(2).run(train_here_until, order, parts, 7, False)
    for steps in (7, 3):  # it stands there already, or behind
        assert world(2).run(train_here_until, order, parts, steps, True)[0]["sha"] == stopped[0]["sha"]
    resumed = world(2).run(train_here_until, order, parts, 12, True)
    assert resumed[0]["losses"] == whole[0]["losses"]
    assert resumed[0]["sha"] == whole[0]["sha"]


def test_a_run_of_three_ranks_resumes_on_two_and_on_one(world: Callable[[int], World], tmp_path: Path) -> None:
    order = small_order(7)
    whole = train_here(order, str(tmp_path / "whole"), max_steps=20)
    world(3).run(train_here_until, order, str(tmp_path / "parts"), 7, False)
    world(2).run(train_here_until, order, str(tmp_path / "parts"), 14, True)
    parts = train_here(order, str(tmp_path / "parts"), max_steps=20, resume=True)
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-10)


def test_a_torus_of_four_ranks_goes_on_as_one_of_three(world: Callable[[int], World], tmp_path: Path) -> None:
    def order(*grid: int) -> RunConfig:
        return dataclasses.replace(small_order(7), exchange=ExchangeConfig(collective="torus", grid=grid))

    whole = train_here(small_order(7), str(tmp_path / "whole"), max_steps=12)
    world(4).run(train_here_until, order(2, 2), str(tmp_path / "parts"), 5, False)
    parts = world(3).run(train_here_until, order(3, 1), str(tmp_path / "parts"), 12, True)
    assert parts[0]["losses"] == pytest.approx(whole["losses"], rel=1e-10)


@pytest.mark.parametrize("collective", ["hierarchical", "torus", "halving"])
def test_every_collective_takes_the_path_of_one_rank(
    world: Callable[[int], World], tmp_path: Path, collective: str
) -> None:
    order = dataclasses.replace(small_order(8), exchange=ExchangeConfig(collective=collective))  # type: ignore[arg-type]
    alone = train_here(order, str(tmp_path / "1"), max_steps=10)
    together = world(4).run(train_here_until, order, str(tmp_path / "4"), 10, False)
    assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-10)


def unequal_start(folder: str) -> str:
    """Build a model from a seed that depends on the rank."""
    torch.manual_seed(torch.distributed.get_rank())
    data = Eighty()
    try:
        fit(small_order(4), nn.Sequential(nn.Flatten(), nn.Linear(144, 3)), (data, data), out=folder, device="cpu")
    except Exception as error:
        return str(error)
    return "nothing was said"


def test_a_rank_that_starts_elsewhere_is_named(world: Callable[[int], World], tmp_path: Path) -> None:
    sentences = world(2).run(unequal_start, str(tmp_path))
    assert all("initial weights of rank 1 differ from those of rank 0" in sentence for sentence in sentences)
    assert all("torch.manual_seed before it is made" in sentence for sentence in sentences)


def test_memory_does_not_grow_with_workers() -> None:
    """2,048 workers on one rank: what the norm layer, optimizer and forwards keep is independent of the count."""
    from bigstep.engine.build import build
    from bigstep.engine.ranks import Ranks

    def kept(workers: int) -> int:
        order = dataclasses.replace(config(), workers=WorkersConfig(count=workers, local_batch=1), data=DataConfig())
        learner = build(order, Ranks()).learner
        tensors = [value for value in vars(learner.statistics).values() if isinstance(value, torch.Tensor)]
        return sum(t.numel() for t in tensors) + sum(b.numel() for b in learner.model.buffers())

    assert kept(2048) == kept(2)
