"""Locked SGD, Hogwild! and Downpour with one replica are a serial run on the same order, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigstep import recipes
from bigstep.asynchronous import join_downpour, train_downpour, train_hogwild, train_locked
from bigstep.asynchronous.board import Board, adopt_state, shared_state
from bigstep.asynchronous.gate import split_address
from bigstep.asynchronous.limits import require_runnable
from bigstep.asynchronous.shares import Shares, batches_of
from bigstep.bench.suites import SUITES, Options, planned_runs
from bigstep.config import (
    AsynchronousConfig,
    DataConfig,
    LrConfig,
    OptimizerConfig,
    Piece,
    Resize,
    RunConfig,
    WorkersConfig,
)
from bigstep.data.feed import Feed
from bigstep.data.sampler import Sampler
from bigstep.data.waits import Waits
from bigstep.engine.build import Own, build
from bigstep.engine.ranks import Ranks
from bigstep.engine.rates import batch_plan
from bigstep.errors import ConfigError, RunError
from bigstep.optim import parameter_groups
from bigstep.records import median_of_last_epochs, read_run


class Ninety(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Ninety small images in three classes: an epoch of 2 workers x 8 ends with an incomplete batch of 10."""

    classes = ("a", "b", "c")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(90, 1, 8, 8, generator=generator)
        self.labels = torch.arange(90).remainder(3)
        self.images += 0.3 * self.labels.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 3))


def order(optimizer: OptimizerConfig, **asynchronous: Any) -> RunConfig:
    return RunConfig(
        recipe="test",
        data=DataConfig(loaders=0),
        workers=WorkersConfig(count=2, local_batch=8),
        epochs=3,
        optimizer=optimizer,
        lr=LrConfig(base=0.05, scaling="none", schedule=(Piece(shape="warmup", until=2, start=0.1),)),
        evaluate_every=100,
        asynchronous=AsynchronousConfig(**asynchronous),
    )


def serial(config: RunConfig) -> nn.Sequential:
    """The reference: one process, one share after another, torch's own modules and optimizers."""
    torch.set_num_threads(1)
    model, data, settings = network(), Ninety(), config.optimizer
    groups = parameter_groups(model, settings.weight_decay)
    optimizer: torch.optim.Optimizer
    if settings.name == "adagrad":
        optimizer = torch.optim.Adagrad(groups, lr=1.0, eps=settings.eps)
    else:
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum)
    sampler = Sampler(len(data), config.seed, batch_plan(config))
    for step in sampler.steps(config.epochs):
        for worker in range(step.active):
            start, stop = step.share(worker)
            indices = sampler.order(step.position.epoch)[start:stop]
            epoch = step.position.epoch + start / len(data)
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (0.1 + 0.9 * epoch / 2 if epoch < 2 else 1.0)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.images[indices]), data.labels[indices]).backward()
            optimizer.step()
    return model


SGD = OptimizerConfig(name="sgd", momentum=0.9, weight_decay=1e-3)
ADAGRAD = OptimizerConfig(name="adagrad", eps=1e-8, weight_decay=1e-3)
SHARES = 3 * 12  # 90 samples: five steps of 2 x 8 and one of 10 = 5 + 5


@pytest.mark.parametrize(
    ("train", "config"),
    [
        (train_locked, order(SGD, replicas=2)),
        (train_hogwild, order(SGD, replicas=1)),
        (train_downpour, order(ADAGRAD, replicas=1, shards=2)),
    ],
    ids=["locked", "hogwild of one", "downpour of one"],
)
def test_equals_a_serial_run_bit_for_bit(
    train: Any, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bits of a sum depend on the number of threads
    expected = serial(config)
    model, data = network(), Ninety()
    result = train(config, model, (data, data), out=tmp_path, device="cpu")
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), f"{name} differs"
    # torch's running averages round in another order than ours
    torch.testing.assert_close(model[1].running_mean, expected[1].running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model[1].running_var, expected[1].running_var, rtol=1e-5, atol=1e-6)
    facts = result.facts
    copies = config.asynchronous.shards if train is train_downpour else 1  # each shard counts for itself
    assert facts["staleness"] == {"0": SHARES * copies}
    assert facts["updates"] == SHARES
    assert facts["lost_updates"] == 0
    assert facts["samples"] == 270
    run = read_run(tmp_path)
    assert run.result == facts
    assert len(run.train) == SHARES
    assert {row["replica"] for row in run.train} <= set(range(config.asynchronous.replicas))
    assert sum(row["batch"] for row in run.train) == 270
    assert run.train[-1]["epoch"] == 3.0
    assert run.evaluations[-1]["accuracy"] == result.accuracy


def test_a_replica_that_fetches_seldom_steps_with_momentum_and_decay_as_its_shard_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, model, data = order(SGD, replicas=1, fetch_every=5), network(), Ninety()
    result = train_downpour(config, model, (data, data), out=tmp_path, device="cpu")
    for name, parameter in serial(config).named_parameters():  # a step of its own that differs would not stay hidden
        assert torch.equal(parameter, model.get_parameter(name)), f"{name} differs"
    assert set(result.facts["staleness"]) == {"0", "1", "2", "3", "4"}  # weights were read up to four pushes before


def test_hogwild_of_two_learns_and_counts(tmp_path: Path) -> None:
    model, data = network(), Ninety()
    config = dataclasses.replace(order(SGD, replicas=2), epochs=20)
    result = train_hogwild(config, model, (data, data), out=tmp_path, device="cpu")
    assert result.facts["updates"] == 240
    assert result.facts["accuracy_last5"] == median_of_last_epochs(read_run(tmp_path).evaluations)
    assert sum(result.facts["staleness"].values()) == 240
    assert 0 <= result.facts["lost_updates"] <= 240
    assert result.accuracy is not None
    assert result.accuracy > 0.9  # chance is a third
    assert {row["replica"] for row in read_run(tmp_path).train} == {0, 1}


class Fails:
    """A loss that fails in training."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("of my own making")


def test_a_replica_that_fails_is_named_with_its_reason() -> None:
    data = Ninety()
    with pytest.raises(RunError, match="Replica 0 failed: ZeroDivisionError: of my own making"):
        train_hogwild(order(SGD, replicas=1), network(), (data, data), Fails(), device="cpu")


def board_of(replicas: int) -> Board:
    run = build(order(SGD), Ranks(), Own(network(), (Ninety(), Ninety())))
    return Board.of(run.learner, replicas, locked=False)


def test_a_replica_holds_one_share_at_a_time() -> None:
    """Whoever dies takes along what it has drawn; the feed of a set in memory prepares shares together if it may."""
    run = build(recipes.load("downpour"), Ranks(device=torch.device("cpu")))
    drawn: list[int] = []

    def draw() -> int:
        drawn.append(len(drawn))
        return drawn[-1]

    batches = batches_of(run, Shares(run.sampler, epochs=1, limit=5), draw)
    for number, (share, (images, _)) in enumerate(batches):
        assert drawn == list(range(number + 1))
        assert (share.position.step, len(images)) == (number, share.size)
    assert len(drawn) == 6  # the sixth told that the run has ended


def test_a_replica_keeps_nothing_of_what_a_gpu_measures_of_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waits, "handed", lambda waits, asked, ready: waits._handed.append((asked, ready)))
    monkeypatch.setattr(Feed, "waits", property(lambda feed: feed._way.waits))
    run = build(order(SGD), Ranks(), Own(network(), (Ninety(), Ninety())))
    drawn = iter(range(100))
    shares = Shares(run.sampler, epochs=2)
    kept = [len(run.train_feed.waits or ()) for _ in batches_of(run, shares, lambda: next(drawn))]
    assert set(kept) == {1}
    run.close()


def test_staleness_and_overlaps_are_those_of_the_schedule() -> None:
    """A fake order of reads and writes, no clock: what was injected is what is counted."""
    board = board_of(3)
    read = [board.version for _ in range(3)]
    assert [board.write(replica, read[replica], lambda: None).staleness for replica in range(3)] == [0, 1, 2]
    before = board.version
    inner = []
    outer = board.write(0, before, lambda: inner.append(board.write(1, before, lambda: None)))
    assert outer.overlapped
    assert inner[0].overlapped
    assert not board.write(2, board.version, lambda: None).overlapped


def test_optimizer_state_is_shared_and_starts_at_zero() -> None:
    model = network()
    weights = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    state = shared_state(optimizer)
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
    assert all(buffer["momentum_buffer"].is_shared() and not buffer["momentum_buffer"].any() for buffer in state)
    other = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    adopt_state(other, state)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()
    assert all(torch.equal(each["momentum_buffer"], torch.ones_like(each["momentum_buffer"])) for each in state)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": OptimizerConfig(name="rmsprop_warmup")}, "locked takes sgd, lars, adagrad"),
        ({"precision": "fp16"}, "loss scale"),
        ({"data": DataConfig(sizes=(Resize(epoch=0, image_size=8),))}, "keeps one image size"),
    ],
)
def test_what_only_the_synchronous_loop_does_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train_locked(dataclasses.replace(order(SGD), **changes), device="cpu")


@pytest.mark.parametrize("method", ["locked", "hogwild"])
def test_weights_that_may_be_torn_are_not_resumed(method: Any) -> None:
    config = order(SGD, method=method, replicas=1)
    with pytest.raises(ConfigError, match=f"A {method} run cannot be resumed"):
        require_runnable(config, Ranks(device=torch.device("cpu")), resume=True)


def test_downpour_refuses_a_rule_that_needs_whole_layers() -> None:
    with pytest.raises(ConfigError, match="sees no whole layers"):
        train_downpour(order(OptimizerConfig(name="lars")), device="cpu")


def test_what_cannot_travel_is_refused_before_a_process_exists() -> None:
    data = Ninety()
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        train_hogwild(order(SGD), network(), (data, data), lambda output, target: output.sum(), device="cpu")


@pytest.mark.parametrize("quick", [False, True])
def test_the_suite_of_asynchronous_runs_warms_up_for_a_tenth(quick: bool) -> None:
    runs = [run for run in planned_runs(SUITES["async"], Options(quick=quick)) if run.recipe == "downpour"]
    assert len(runs) > 1
    for run in runs:
        config = run.config()
        assert config.asynchronous.warm_start == pytest.approx(0.1 * config.epochs)


def test_a_server_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGSTEP_SECRET", "a secret of both sides")
    with pytest.raises(RunError, match=r"No parameter server answers at 127\.0\.0\.1:1 within 0\.3 s"):
        join_downpour("127.0.0.1:1", device="cpu", timeout_s=0.3)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:port", ":1", "host:99999"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(address)


@pytest.mark.parametrize("field", ["replicas", "shards", "push_every", "fetch_every", "warm_start", "max_staleness"])
def test_fields_are_checked(field: str) -> None:
    with pytest.raises(ConfigError, match=f"asynchronous.{field} is -1"):
        AsynchronousConfig(**{field: -1})
