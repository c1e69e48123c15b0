"""Downpour: staleness as injected, updates applied once, replicas that die or come late, shards that are restarted."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bigstep.asynchronous import join_downpour, train_downpour
from bigstep.asynchronous.client import Client
from bigstep.asynchronous.layout import Layout
from bigstep.asynchronous.server import serve_shard, stop_shard
from bigstep.asynchronous.shard import Push, Shard
from bigstep.asynchronous.store import connect_store, host_store
from bigstep.config import (
    AsynchronousConfig,
    CheckpointConfig,
    DataConfig,
    LrConfig,
    OptimizerConfig,
    RunConfig,
    WorkersConfig,
)
from bigstep.errors import ConfigError
from bigstep.records import read_run
from test_async import ADAGRAD, Ninety, network, serial
from test_async import SHARES as SERIAL_SHARES
from test_async import order as serial_order
from worlds import forked_context

PATIENCE_S = 50


def layout(shards: int = 1, name: str = "sgd", **changes: Any) -> Layout:
    base = Layout(
        sizes=(3, 4),
        decays=(0.1, 0.0),
        averages=2,
        shards=shards,
        dtype="float64",
        optimizer={"name": name, "momentum": 0.9, "eps": 1e-8},
        keep=0.9,
        max_staleness=0,
        save_every=0,
        keep_checkpoints=1,
    )
    return dataclasses.replace(base, **changes)


def push(replica: int, sequence: int, read_at: int, steps: int = 1) -> Push:
    return Push(replica=replica, sequence=sequence, read_at=read_at, lr=0.1, steps=steps, samples=8)


@pytest.mark.parametrize("seed", range(5))
def test_staleness_measured_is_staleness_injected(seed: int) -> None:
    """Replicas read and push in a random order that is written down; no clock decides anything."""
    rng = random.Random(seed)
    shard, sequence, injected = Shard(layout(), 0), [0] * 4, []
    read: dict[int, int] = {}
    applied = 0
    for _ in range(200):
        replica = rng.randrange(4)
        if replica in read:
            sequence[replica] += 1
            lag = applied - read.pop(replica)
            receipt = shard.push(push(replica, sequence[replica], applied - lag), torch.ones(9, dtype=torch.float64))
            assert receipt.staleness == lag
            injected.append(lag)
            applied += 1
        else:
            read[replica] = shard.fetch()[1]
            assert read[replica] == applied
    assert sorted(shard.staleness.elements()) == sorted(injected)
    assert max(injected) > 2


def test_a_bound_refuses_what_is_staler_and_says_so() -> None:
    shard = Shard(layout(max_staleness=1), 0)
    gradient = torch.ones(9, dtype=torch.float64)
    receipts = [shard.push(push(replica, 1, 0), gradient) for replica in range(3)]
    assert [receipt.accepted for receipt in receipts] == [True, True, False]
    before = shard.fetch()[0]
    assert not shard.push(push(3, 1, 0), gradient).accepted
    assert torch.equal(shard.fetch()[0], before)
    assert (shard.version, shard.refused) == (2, 2)


def test_a_push_that_is_sent_again_is_applied_once() -> None:
    shard = Shard(layout(), 0)
    first = shard.push(push(0, 1, 0), torch.ones(9, dtype=torch.float64))
    weights = shard.fetch()[0]
    again = shard.push(push(0, 1, 0), torch.ones(9, dtype=torch.float64))
    assert (first.version, again.version, again.accepted) == (1, 1, True)
    assert torch.equal(shard.fetch()[0], weights)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize(("shards", "chunk"), [(1, 9), (2, 9), (3, 9), (9, 9), (1, 1), (1, 4), (2, 2)])
def test_any_number_of_shards_and_chunks_computes_the_equations(shards: int, chunk: int, name: str) -> None:
    """The reference is written from the equations; 9 elements on 9 shards cut through every parameter."""
    whole = layout(shards, name, chunk=chunk)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(9, generator=generator, dtype=torch.float64)
    servers = [Shard(whole, index) for index in range(shards)]
    for server in servers:
        server.put(start[slice(*whole.bounds(server.index))])
    weights, averages, memory = start[:7].clone(), start[7:].clone(), torch.zeros(7, dtype=torch.float64)
    decay = torch.tensor([0.1] * 3 + [0.0] * 4, dtype=torch.float64)
    for number in range(1, 6):
        vector = torch.randn(9, generator=generator, dtype=torch.float64)
        steps = number % 2 + 1
        for server in servers:
            server.push(push(0, number, number - 1, steps), vector[slice(*whole.bounds(server.index))].clone())
        gradient = vector[:7] + decay * weights
        if name == "sgd":
            memory = 0.9 * memory + gradient
            weights = weights - 0.1 * memory
        else:
            memory = memory + gradient**2
            weights = weights - 0.1 * gradient / (memory.sqrt() + 1e-8)
        averages = 0.9**steps * averages + (1 - 0.9**steps) * vector[7:] / steps
    found = torch.cat([server.fetch()[0] for server in servers])
    torch.testing.assert_close(found, torch.cat([weights, averages]), rtol=1e-12, atol=1e-12)  # float64 rounding


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_a_shard_goes_on_from_its_state_with_the_same_bits(name: str) -> None:
    gradients = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, two = Shard(layout(name=name), 0), Shard(layout(name=name), 0)
    for number in range(3):
        one.push(push(0, number + 1, number), gradients[number].clone())
    two.load_state_dict(one.state_dict())
    for shard in (one, two):
        for number in range(2, 6):  # the third one comes again, as after a broken line
            shard.push(push(0, number + 1, number), gradients[number].clone())
    assert torch.equal(one.fetch()[0], two.fetch()[0])
    assert one.staleness == two.staleness
    assert two.version == 6


def test_a_push_that_broke_off_between_chunks_is_finished_when_it_comes_again() -> None:
    cut, whole = Shard(layout(name="adagrad", chunk=4), 0), Shard(layout(name="adagrad"), 0)
    gradient = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shard in (cut, whole):
        shard.push(push(1, 1, 0), gradient.flip(0))
    cut.push_chunk(push(0, 1, 0), 0, gradient[:4])
    assert (cut.version, cut.shares) == (2, 1)  # begun, not done
    restarted = Shard(layout(name="adagrad", chunk=4), 0)
    restarted.load_state_dict(cut.state_dict())
    again = restarted.push(push(0, 1, 0), gradient.clone())
    whole.push(push(0, 1, 0), gradient.clone())
    assert (again.accepted, restarted.version, restarted.shares, restarted.samples) == (True, 2, 2, 16)
    assert torch.equal(restarted.fetch()[0], whole.fetch()[0])
    assert restarted.staleness == whole.staleness


def test_chunks_on_the_wire_give_the_bits_of_the_whole(tmp_path: Path) -> None:
    """A shard and a client over a real line, in chunks of 64 of 1,000 elements, the last of them short."""
    store, where = host_store("127.0.0.1:0")
    cut = Layout(
        sizes=(301, 650), decays=(0.1, 0.0), averages=49, shards=2, dtype="float32", keep=0.9, max_staleness=0,
        save_every=0, keep_checkpoints=1, optimizer={"name": "adagrad", "eps": 1e-8}, chunk=64,
    )  # fmt: skip
    store.set("layout", cut.to_json())
    clients = [connect_store(where) for _ in range(2)]
    serving = [
        threading.Thread(target=serve_shard, args=(client, where, index, tmp_path / str(index)), daemon=True)
        for index, client in enumerate(clients)
    ]
    for thread in serving:
        thread.start()
    whole = Shard(dataclasses.replace(cut, shards=1, chunk=1000), 0)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    client = Client(store, where.secret, cut)
    client.put(start).result()
    whole.put(start)
    versions = [0, 0]
    for number in range(1, 4):
        gradient = torch.randn(1000, generator=generator)
        answer = client.exchange(push(0, number, 0), versions, gradient, fetch=True).result()
        whole.push(push(0, number, number - 1), gradient)
        assert answer.weights is not None
        assert torch.equal(answer.weights, whole.fetch()[0])
        versions = answer.versions
        assert (versions, answer.staleness) == ([number, number], 0)
    client.close()
    for index in range(2):
        stop_shard(store, index)
    until(lambda: store.check(["final/0", "final/1"]))
    for thread in serving:  # what they told is there before they have heard that it is
        thread.join(timeout=60)
    for each in (*clients, store):
        each.close()


def order(**asynchronous: Any) -> RunConfig:
    return RunConfig(
        recipe="test",
        data=DataConfig(loaders=0),
        workers=WorkersConfig(count=3, local_batch=5),
        epochs=4,
        optimizer=OptimizerConfig(name="adagrad", eps=1e-8),
        lr=LrConfig(base=0.02, scaling="none"),
        checkpoint=CheckpointConfig(every=0.25),
        evaluate_every=100,
        asynchronous=AsynchronousConfig(**asynchronous),
    )


SHARES = 4 * 18


class Gated:
    """Cross-entropy that waits, in the middle of a replica's step number `calls`, until the gate is open."""

    def __init__(self, gate: Path, calls: int):
        self.gate, self.calls, self.seen = gate, calls, 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.seen += output.requires_grad  # evaluations have none
        if output.requires_grad and self.seen == self.calls:
            (self.gate.parent / f"waiting-{os.getpid()}").touch()
            until(self.gate.exists)
        return nn.functional.cross_entropy(output, target)


def until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := holds()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return value


def pid_of(name: str) -> int | None:
    return next((child.pid for child in multiprocessing.active_children() if child.name == name), None)


class Stagehand(threading.Thread):
    """Acts beside a run, and fails the test if it fails."""

    def __init__(self, act: Callable[[], None]):
        super().__init__(daemon=True)
        self.act, self.error = act, None

    def run(self) -> None:
        try:
            self.act()
        except BaseException as error:
            self.error = error

    def leave(self) -> None:
        self.join(PATIENCE_S)
        if self.error is not None:
            raise self.error


def waiting(folder: Path, name: str) -> Callable[[], bool]:
    """Whether a replica waits at the gate."""
    return lambda: (pid := pid_of(name)) is not None and (folder / f"waiting-{pid}").exists()


@pytest.mark.parametrize("calls", [1, 5])
def test_a_killed_replica_loses_its_step_and_a_late_one_takes_part(
    tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGSTEP_SECRET", "a secret of both sides")
    gate, folder, data = tmp_path / "gate", tmp_path / "run", Ninety()
    joined: list[int] = []

    def act() -> None:
        until(waiting(tmp_path, "replica-1"))
        os.kill(pid_of("replica-1"), signal.SIGKILL)
        until(waiting(tmp_path, "replica-0"))  # so whatever is left falls to the replica that joins now
        address = re.search(r"is at (\S+:\d+)\.", " ".join(read_run(folder).notes)).group(1)
        joined.append(join_downpour(address, network(), (data, data), device="cpu"))
        gate.touch()

    stagehand = Stagehand(act)
    stagehand.start()
    result = train_downpour(
        order(replicas=2, shards=1), network(), (data, data), Gated(gate, calls), out=folder, device="cpu"
    )
    stagehand.leave()
    assert result.facts["lost_updates"] == 1  # the step that the killed replica was in
    assert result.facts["updates"] == SHARES - 1
    assert result.facts["samples"] == 4 * 90 - 5
    # the two that were held made calls - 1 updates each before the gate, replica 0 one behind it
    assert joined == [SHARES - 1 - (calls - 1) - calls]
    notes = " ".join(read_run(folder).notes)
    assert "Replica 1 was killed by SIGKILL at update" in notes
    assert "Replica 2 joined at update" in notes
    # replica 0 computed one gradient while the late one made all its updates: the stalest of all
    assert max(int(lag) for lag in result.facts["staleness"]) >= joined[0]


def test_a_killed_shard_goes_on_from_its_checkpoint_while_the_replica_waits(tmp_path: Path) -> None:
    gate, folder, data = tmp_path / "gate", tmp_path / "run", Ninety()

    def act() -> None:
        until(waiting(tmp_path, "replica-0"))
        os.kill(pid_of("shard-0"), signal.SIGKILL)
        gate.touch()

    stagehand = Stagehand(act)
    stagehand.start()
    # a checkpoint every 4 updates (a quarter of 18 shares): the 11 before the gate lose those since the 8th
    result = train_downpour(
        order(replicas=1, shards=1), network(), (data, data), Gated(gate, 12), out=folder, device="cpu"
    )
    stagehand.leave()
    notes = " ".join(read_run(folder).notes)
    assert "Shard 0 was killed by SIGKILL at update 11 and is started again" in notes
    assert "Shard 0 is back at update 8; 3 updates were lost on it." in notes
    assert result.facts["lost_updates"] == 3
    assert result.facts["updates"] == SHARES - 3
    assert len(list((folder / "checkpoints" / "shard-0").glob("step-*.ckpt"))) == 2


RESUMED = dataclasses.replace(serial_order(ADAGRAD, replicas=1, shards=1), checkpoint=CheckpointConfig(every=0.25))


def run_to_the_gate(folder: Path, gate: Path) -> None:
    from bigstep.asynchronous import board, processes

    # this process has torch from the server; those of its run, which are spawned elsewhere, have it from here
    forking = SimpleNamespace(get_context=lambda method: multiprocessing.get_context("fork"))
    board.multiprocessing = processes.multiprocessing = forking  # type: ignore[assignment]
    data = Ninety()
    train_downpour(RESUMED, network(), (data, data), Gated(gate, 12), out=folder, device="cpu")


def test_a_run_killed_as_a_whole_goes_on_with_the_bits_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bits of a sum depend on the number of threads
    folder, model, data = tmp_path / "run", network(), Ninety()
    run = forked_context().Process(target=run_to_the_gate, args=(folder, tmp_path / "gate"))
    run.start()
    until(lambda: list(tmp_path.glob("waiting-*")))
    run.kill()
    run.join()
    with pytest.raises(ConfigError, match="was started with epochs=3"):
        train_downpour(dataclasses.replace(RESUMED, epochs=4), model, (data, data), out=folder, resume=True)
    result = train_downpour(RESUMED, model, (data, data), out=folder, device="cpu", resume=True)
    # a checkpoint every 3 updates (a quarter of 11.25 shares): the 11 before the gate lose those since the 9th
    records = read_run(folder)
    assert "Resumed at update 9." in records.notes
    steps = [row["step"] for row in records.train]  # of those before, what was not yet on disk is lost
    assert steps[steps.index(10) :] == list(range(10, SERIAL_SHARES + 1))
    assert steps == sorted(set(steps))
    assert (result.facts["updates"], result.facts["samples"]) == (SERIAL_SHARES, 270)
    assert result.facts["lost_updates"] == 0
    for name, parameter in serial(RESUMED).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), f"{name} differs"


def test_pushes_and_fetches_apart_overlapped_and_bounded_still_see_every_share(tmp_path: Path) -> None:
    data = Ninety()
    config = dataclasses.replace(
        order(replicas=2, shards=1, push_every=2, fetch_every=3, overlap=True, warm_start=1.0, max_staleness=40),
        optimizer=OptimizerConfig(name="sgd", momentum=0.0),
    )
    result = train_downpour(config, network(), (data, data), out=tmp_path, device="cpu")
    assert result.facts["samples"] == 4 * 90
    assert result.facts["lost_updates"] == 0
    assert SHARES // 2 <= result.facts["updates"] <= SHARES // 2 + 2
    assert result.accuracy is not None
    assert result.accuracy > 0.6  # chance is a third
    first_epoch = [row["replica"] for row in read_run(tmp_path).train if row["epoch"] < 0.9]
    assert set(first_epoch) == {0}  # the warm start


def test_a_run_that_ends_within_its_warm_start_ends(tmp_path: Path) -> None:
    """The other replicas wait for the warm start, and the coordinator for them."""
    config, data = order(replicas=2, shards=1, warm_start=1.0), Ninety()
    began = time.monotonic()
    result = train_downpour(config, network(), (data, data), out=tmp_path, max_steps=5, device="cpu")
    assert result.facts["updates"] == 5 < 18, "of the 18 of the warm start"
    assert time.monotonic() - began < PATIENCE_S
