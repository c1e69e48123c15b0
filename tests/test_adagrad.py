"""AdaGrad before the exchange or after it: equal to the equations, resumed exactly; the warm-up keeps its share."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigstep import recipes
from bigstep.config import (
    AsynchronousConfig,
    CheckpointConfig,
    ExchangeConfig,
    LrConfig,
    OptimizerConfig,
    RunConfig,
    Stage,
    WorkersConfig,
)
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.engine.build import Emulation, Own, build
from bigstep.engine.checkpoint import load_latest, save_checkpoint
from bigstep.engine.loop import train
from bigstep.engine.observers.base import Audience
from bigstep.engine.ranks import Ranks
from bigstep.errors import ConfigError
from bigstep.exchange import Exchange, sum_owed
from bigstep.optim import AdaGradSGD, RankAdaGrad, parameter_groups
from bigstep.train import fit
from test_same_path import Eighty, small_order, train_here_until
from worlds import World

LR, MOMENTUM, EPS, DECAY = 0.05, 0.8, 1e-3, 0.01
ONEBIT = ExchangeConfig(collective="gather", codec="onebit", warmup_steps=2)


def network() -> nn.Module:
    """Weights, biases and a layer in channels-last order, in float64."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def images_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(50 * step + rank), dtype=torch.float64)


def loss_of(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).square().mean()  # type: ignore[no-any-return]


def by_the_equations(ranks: int, steps: int, before: bool, nesterov: bool = False) -> list[Tensor]:
    """Every rank's part of `steps` steps in one process, one parameter after another."""
    model = network()
    params = list(model.parameters())
    squares: dict[tuple[int, int], Tensor] = {}
    velocity = [torch.zeros_like(p) for p in params]

    def scaled(gradient: Tensor, weight: Tensor, key: tuple[int, int]) -> Tensor:
        g = gradient + (DECAY if weight.ndim > 1 else 0.0) * weight
        squares[key] = squares.get(key, torch.zeros_like(g)) + g**2
        return g / (squares[key].sqrt() + EPS)

    for step in range(steps):
        gradients = [torch.autograd.grad(loss_of(model, images_of(r, step)), params) for r in range(ranks)]
        with torch.no_grad():
            for i, p in enumerate(params):
                if before:
                    g = sum(scaled(gradients[r][i], p, (r, i)) for r in range(ranks)) / ranks
                else:
                    g = scaled(sum(gradients[r][i] for r in range(ranks)) / ranks, p, (0, i))
                velocity[i] = MOMENTUM * velocity[i] + g
                p -= LR * (g + MOMENTUM * velocity[i] if nesterov else velocity[i])
    return [p.detach().clone() for p in params]


def with_the_exchange(before: bool, nesterov: bool) -> list[Tensor]:
    model = network()
    groups = parameter_groups(model, DECAY)
    prepare = RankAdaGrad(model, groups, EPS) if before else None
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    exchange = Exchange("halving", prepare=prepare)
    exchange.attach(ddp)
    optimizer: torch.optim.Optimizer
    if before:
        optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, nesterov=nesterov)
    else:
        optimizer = AdaGradSGD(groups, LR, MOMENTUM, nesterov=nesterov, eps=EPS)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(ddp, images_of(dist.get_rank(), step)).backward()
        optimizer.step()
    exchange.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("before", [True, False])
def test_adagrad_with_momentum_on_three_ranks_is_the_equations(
    world: Callable[[int], World], before: bool, nesterov: bool
) -> None:
    expected = by_the_equations(3, 6, before, nesterov)
    for weights in world(3).run(with_the_exchange, before, nesterov):
        torch.testing.assert_close(weights, expected, rtol=1e-11, atol=1e-11)  # float64, sums in another order
    other = by_the_equations(3, 6, not before, nesterov)
    assert max(float((a - b).abs().max()) for a, b in zip(expected, other, strict=True)) > 1e-3, "the place matters"


def test_without_momentum_it_is_the_adagrad_of_torch() -> None:
    ours, theirs = network(), network()
    first = AdaGradSGD(parameter_groups(ours, DECAY), LR, 0.0, eps=EPS)
    second = torch.optim.Adagrad(parameter_groups(theirs, DECAY), LR, eps=EPS)
    for step in range(5):
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            loss_of(model, images_of(0, step)).backward()
            optimizer.step()
    assert "momentum_buffer" not in first.state[next(ours.parameters())]
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rate_on_the_device_and_state_made_beforehand_change_nothing(momentum: float) -> None:
    by_number, by_tensor = network(), network()
    first = AdaGradSGD(parameter_groups(by_number, DECAY), LR, momentum, eps=EPS)
    second = AdaGradSGD(parameter_groups(by_tensor, DECAY), torch.tensor(LR, dtype=torch.float64), momentum, eps=EPS)
    second.create_state()
    made = {id(value) for state in second.state.values() for value in state.values()}
    for step in range(5):
        for model, optimizer in ((by_number, first), (by_tensor, second)):
            optimizer.zero_grad()
            loss_of(model, images_of(0, step)).backward()
            optimizer.step()
    torch.testing.assert_close(list(by_tensor.parameters()), list(by_number.parameters()), rtol=1e-12, atol=1e-12)
    assert made == {id(value) for state in second.state.values() for value in state.values()}
    assert len(made) == len(list(by_tensor.parameters())) * (2 if momentum else 1)


def test_a_gradient_that_is_not_finite_is_passed_on_but_not_remembered() -> None:
    model = nn.Linear(2, 1, bias=False)
    adagrad = RankAdaGrad(model, parameter_groups(model, 0.0), eps=0.0)
    adagrad(model.weight, torch.tensor([[3.0, 4.0]]))
    spoilt = torch.tensor([[4.0, float("nan")]])
    adagrad(model.weight, spoilt)
    assert spoilt.isnan().tolist() == [[False, True]]
    assert adagrad.state_dict()["weight"].tolist() == [[25.0, 16.0]]


def order(adagrad: str, momentum: float = 0.5, **changes: Any) -> RunConfig:
    """Runs of a small network on eighty images in float64, seven workers, a checkpoint every 0.4 epochs."""
    base = dataclasses.replace(
        small_order(7),
        lr=LrConfig(base=0.02, scaling="none"),
        optimizer=OptimizerConfig(adagrad=adagrad, momentum=momentum, weight_decay=1e-3),  # type: ignore[arg-type]
        checkpoint=CheckpointConfig(every=0.4),
    )
    return dataclasses.replace(base, **changes)


def test_on_one_rank_before_and_after_are_the_same_and_after_does_not_depend_on_ranks(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    losses = {place: train_here_until(order(place), str(tmp_path / place), 12, False)["losses"] for place in
              ("none", "before", "after")}  # fmt: skip
    assert losses["before"] == pytest.approx(losses["after"], rel=1e-10)  # roundings of float64
    assert losses["none"] != pytest.approx(losses["after"], rel=1e-3)
    for place, same in (("after", True), ("before", False)):
        several = world(2).run(train_here_until, order(place), str(tmp_path / f"{place}2"), 12, False)[0]["losses"]
        assert (several == pytest.approx(losses[place], rel=1e-10)) == same
        assert several[-1] < 0.9 * several[0]


@pytest.mark.parametrize("place", ["before", "after"])
def test_resuming_gives_the_same_bits_with_one_bit_codes(
    world: Callable[[int], World], tmp_path: Path, place: str
) -> None:
    lossy = order(place, exchange=ONEBIT)
    whole = world(2).run(train_here_until, lossy, str(tmp_path / "whole"), 11, False)
    world(2).run(train_here_until, lossy, str(tmp_path / "parts"), 6, False)
    shutil.copytree(tmp_path / "parts", tmp_path / "three")
    parts = world(2).run(train_here_until, lossy, str(tmp_path / "parts"), 11, True)
    assert {result["sha"] for result in parts} == {result["sha"] for result in whole}
    assert parts[0]["losses"] == whole[0]["losses"]
    three = world(3).run(train_here_until, lossy, str(tmp_path / "three"), 11, True)[0]["losses"]
    assert three[6] == pytest.approx(whole[0]["losses"][6], rel=1e-10), "the same weights on another number of ranks"


def test_other_numbers_of_ranks_take_the_mean_of_the_summed_squares() -> None:
    model = nn.Linear(1, 1, bias=False)
    states = [{"weight": torch.tensor([[4.0]])}, {"weight": torch.tensor([[8.0]])}]
    adagrad = RankAdaGrad(model, parameter_groups(model, 0.0))
    adagrad.load_state_dict(states, 1, 2)
    assert adagrad.state_dict()["weight"].item() == 8.0
    for ranks in (1, 3):
        adagrad.load_state_dict(states, 0, ranks)
        assert adagrad.state_dict()["weight"].item() == 6.0


@pytest.mark.parametrize("codec", ["onebit", "powersgd"])
def test_one_rank_pays_what_several_had_not_delivered(
    world: Callable[[int], World], tmp_path: Path, codec: str
) -> None:
    """From one checkpoint, with and without the exchange's state: weights differ by the rate times what was owed."""
    collective = "gather" if codec == "onebit" else "ring"
    exchange = ExchangeConfig(collective=collective, codec=codec, rank=1)  # type: ignore[arg-type]
    lossy = order("none", momentum=0.0, exchange=exchange, optimizer=OptimizerConfig(momentum=0.0))
    world(2).run(train_here_until, lossy, str(tmp_path / "with"), 6, False)
    shutil.copytree(tmp_path / "with", tmp_path / "without")
    state, _ = load_latest(tmp_path / "without" / "checkpoints")
    assert state is not None
    debt = sum_owed(state["exchange"])
    assert max(float(one.abs().max()) for one in debt.values()) > 1e-3
    save_checkpoint(tmp_path / "without" / "checkpoints", 6, {**state, "exchange": None}, keep=2)
    weights = {}
    for name in ("with", "without"):
        train_here_until(lossy, str(tmp_path / name), 7, True)
        after, _ = load_latest(tmp_path / name / "checkpoints")
        assert after is not None
        weights[name] = after["model"]
    for name, one in debt.items():
        key = name.removeprefix("model.")
        difference = (weights["without"][key] - weights["with"][key]).flatten()
        torch.testing.assert_close(difference, 0.02 * one, rtol=1e-9, atol=1e-12)  # float64


def test_steps_that_are_graphs_pay_each_parameter_what_it_is_owed() -> None:
    """Its optimizer holds weights first and biases behind them, the model one layer after another."""
    weights = []
    for graphs in (False, True):
        model = network()
        data = torch.utils.data.TensorDataset(images_of(0, 0), torch.tensor([0, 1, 2, 0, 1]))
        config = order("none", workers=WorkersConfig(count=1, local_batch=5), precision="float64")
        run = build(config, Ranks(), Own(model, (data, data)), Emulation(graphs=graphs))
        owed = {f"model.{name}": torch.full((p.numel(),), p.numel() / 1e3) for name, p in model.named_parameters()}
        run.state.parts["exchange"].load_state_dict({"carried": {"sent_by_rank": {"0": owed}}, "late": {}})
        train(run, Audience(), max_steps=1)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-12, atol=1e-14)  # float64, sums in another order


def test_the_warm_up_does_not_begin_again_when_one_rank_is_joined(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    lossy = order("after", exchange=ONEBIT)
    train_here_until(lossy, str(tmp_path), 6, False)
    world(2).run(train_here_until, lossy, str(tmp_path), 7, True)
    state, _ = load_latest(tmp_path / "checkpoints")
    assert state is not None
    assert state["exchange"]["step"] == 7
    assert state["exchange"]["carried"]["owned_by_all"], "a step beyond the warm-up was quantised"


def test_dense_steps_keep_their_share_of_a_shorter_or_longer_run() -> None:
    config = recipes.load("onebit")
    share = config.exchange.warmup_steps / config.epochs
    for epochs in (config.epochs / 4, 6.0, 3 * config.epochs):
        assert abs(stretch(config, epochs).exchange.warmup_steps - share * epochs) <= 0.5
    assert stretch(recipes.load("plain"), 3).exchange.warmup_steps == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["optimizer.name=lars", "optimizer.adagrad=before"], "goes with optimizer.name=sgd"),
        (["optimizer.adagrad=before", "precision=fp16"], "fp16's loss scale"),
        (["optimizer.adagrad=during"], "allowed are after, before, none"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_sentence(settings: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        apply_settings(recipes.load("plain"), settings)


def refusal_of_a_small_stage() -> str:
    small = order("before", plan=(Stage(epoch=1.0, count=1, local_batch=3),))
    with pytest.raises(ConfigError) as refused:
        fit(small, nn.Linear(144, 3), (Eighty(), Eighty()), device="cpu")
    return str(refused.value)


def test_ranks_without_work_and_asynchronous_runs_are_refused(world: Callable[[int], World]) -> None:
    from bigstep.asynchronous import train_hogwild

    assert "has only 1 workers: start at most 1 ranks" in world(2).run(refusal_of_a_small_stage)[0]
    with pytest.raises(ConfigError, match="use optimizer.name=adagrad"):
        train_hogwild(order("after", asynchronous=AsynchronousConfig(method="hogwild")), device="cpu")
