"""The last, incomplete batch of an epoch counts as much as its samples, and not as much as a full one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigstep.config import (
    DataConfig,
    ExchangeConfig,
    LrConfig,
    NormConfig,
    OptimizerConfig,
    RunConfig,
    WorkersConfig,
)
from bigstep.data.sampler import Sampler
from bigstep.engine.rates import batch_plan
from bigstep.optim import LARS
from bigstep.train import fit
from test_same_path import Eighty, train_here_until
from worlds import World

RULES = {
    "sgd": OptimizerConfig(momentum=0.9),
    "lars": OptimizerConfig(name="lars", trust_coefficient=0.02, momentum=0.9),
    "rmsprop_warmup": OptimizerConfig(name="rmsprop_warmup", momentum=0.9, blend_center=1.0, rms_lr=0.01),
}


def order(rule: str = "sgd", **changes: Any) -> RunConfig:
    """Batches of 24, 24, 24 and 8 of the eighty images in each of two epochs."""
    base = RunConfig(
        data=DataConfig(loaders=0),
        workers=WorkersConfig(count=8, local_batch=3),
        epochs=2,
        optimizer=RULES[rule],
        lr=LrConfig(base=0.1, scaling="none"),
        precision="float64",
    )
    return dataclasses.replace(base, **changes)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 3)).double()


def by_hand(config: RunConfig, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], weighed: str) -> Tensor:
    """The loop of a textbook; in a short batch the rate or the gradient is multiplied by a third."""
    data, model = Eighty(), linear()
    optimizer = make(list(model.parameters()))
    sampler = Sampler(len(data), config.seed, batch_plan(config))
    for step in sampler.steps(config.epochs):
        indices = sampler.order(step.position.epoch)[step.start : step.stop]
        loss = nn.functional.cross_entropy(model(data.images[indices]), data.labels[indices])
        optimizer.zero_grad()
        loss.backward()
        part = len(indices) / 24
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (part if weighed == "rate" else 1)
        if weighed == "gradient":
            for parameter in model.parameters():
                parameter.grad *= part
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained(config: RunConfig, tmp_path: Path) -> Tensor:
    model, data = linear(), Eighty()
    fit(config, model, (data, data), out=tmp_path / "run", device="cpu")
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_with_a_velocity_of_gradients_the_gradient_counts_its_part(clip: float, tmp_path: Path) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        if clip:
            optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, clip) and None)
        return optimizer

    config = order(optimizer=dataclasses.replace(RULES["sgd"], clip=clip))
    right, before = (by_hand(config, make, weighed) for weighed in ("gradient", "nothing"))
    result = trained(config, tmp_path)
    torch.testing.assert_close(result, right, rtol=1e-10, atol=1e-12)  # float64; workers change the order of sums
    assert clip or not torch.allclose(result, before, rtol=1e-4), "as if every batch were full"


def test_with_lars_the_rate_does_since_the_length_of_a_gradient_is_nothing_to_it(tmp_path: Path) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        weight, bias = parameters
        groups = [{"params": [weight]}, {"params": [bias], "adapt": False}]
        return LARS(groups, lr=0.1, trust_coefficient=0.02, momentum=0.9)

    right = by_hand(order("lars"), make, "rate")
    torch.testing.assert_close(trained(order("lars"), tmp_path), right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("exact", [False, True], ids=["plain", "exact"])
def test_last_batch_statistics_are_those_of_the_last_full_batch(exact: bool, tmp_path: Path) -> None:
    config = order(norm=NormConfig(statistics="last_batch"))
    if exact:
        config = dataclasses.replace(config, exact=True, exchange=ExchangeConfig(codec="exact"))
    behind_full, behind_short, next_full = (
        train_here_until(config, str(tmp_path / str(steps)), steps, False)["mean"] for steps in (3, 4, 5)
    )
    assert torch.equal(behind_full, behind_short)
    assert not torch.equal(behind_short, next_full)


def test_moving_statistics_move_by_the_part_that_a_batch_holds() -> None:
    from bigstep.norm import WorkerStatistics

    norm = nn.BatchNorm1d(1)
    statistics = WorkerStatistics(norm, keep=0.5)
    for batch, filled in (([[1.0], [3.0]], 1.0), ([[8.0], [10.0]], 0.5)):
        statistics.begin_forward(0, now=1)
        norm(torch.tensor(batch))
        statistics.end_step(1.0, filled)
    statistics.synchronize(lambda flat: flat)
    assert float(norm.running_mean) == 0.75 * 1.0 + 0.25 * 9.0  # type: ignore[arg-type]


def test_statistics_of_a_short_batch_are_the_mean_over_the_workers_that_have_samples(tmp_path: Path) -> None:
    """All samples are alike, so every batch has their mean; of the last one three workers of eight hold samples."""
    data = Eighty()
    data.images.fill_(2.0)
    norm = nn.BatchNorm1d(144)
    model = nn.Sequential(nn.Flatten(), norm, nn.Linear(144, 3)).double()
    fit(order(epochs=1, norm=NormConfig(statistics="moving")), model, (data, data), out=tmp_path / "run", device="cpu")
    left = 0.9**3 * (1 - 0.1 / 3)  # of the start at 0: three full batches, and a third of one
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, torch.full_like(norm.running_mean, 2.0 * (1 - left)))


def test_a_short_batch_that_double_buffering_has_on_its_way_counts_its_part_behind_a_resume(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    config = order(exchange=ExchangeConfig(collective="ring", double_buffer=True))
    whole = world(2).run(train_here_until, config, str(tmp_path), 7, False)
    saved = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.stem[-1] for path in saved] == ["4", "7"]  # at 4 the short batch has just left
    saved[1].unlink()
    parts = world(2).run(train_here_until, config, str(tmp_path), 7, True)
    assert parts[0]["losses"] == whole[0]["losses"]
    assert {rank["sha"] for rank in parts} == {rank["sha"] for rank in whole}


@pytest.mark.parametrize("rule", ["rmsprop_warmup", "lars"])
def test_ranks_agree_on_what_a_short_batch_counts(rule: str, world: Callable[[int], World], tmp_path: Path) -> None:
    alone = train_here_until(order(rule), str(tmp_path / "1"), 8, False)
    together = world(3).run(train_here_until, order(rule), str(tmp_path / "3"), 8, False)
    assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-10)
