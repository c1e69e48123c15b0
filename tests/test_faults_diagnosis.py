"""A run that says who is slow and which layer broke, hears signals on any rank, and does not look at the calendar."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigstep.config import CheckpointConfig, DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.engine.heartbeat import innermost
from bigstep.engine.interruption import StoppedError
from bigstep.errors import RunError
from bigstep.records import read_run
from bigstep.train import fit
from worlds import World


class Sixty(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Sixty small images; `strike` is called when a chosen one is looked at for the n-th time."""

    classes = ("a", "b", "c")

    def __init__(self, index: int = -1, times: int = 0, strike: Callable[[], Any] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(60, 1, 8, 8, generator=generator, dtype=torch.float64)
        self.index, self.times, self.strike = index, times, strike

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.index:
            self.times -= 1
            if self.times == 0 and self.strike is not None:
                self.strike()
        return self.images[index], index % 3


def order(**changes: Any) -> RunConfig:
    """Five steps an epoch."""
    base = RunConfig(
        workers=WorkersConfig(count=4, local_batch=3), data=DataConfig(loaders=0), epochs=6, precision="float64",
        lr=LrConfig(base=0.05, scaling="none"), evaluate_every=100, checkpoint=CheckpointConfig(every=0.5),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *more, nn.ReLU(), nn.Linear(8, 3))


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def interrupt(number: int, on_rank: int, folder: str) -> tuple[str, int, str]:
    """Train; one rank gets a signal in the third epoch; resume; return the sentence, its status, and the hash."""
    strike = (lambda: os.kill(os.getpid(), number)) if rank() == on_rank else None
    said, status = "nothing", 0
    try:
        # every sample is seen once an epoch, by whichever rank hosts it: strike on the first image of this rank
        fit(order(), network(), (_StrikeAtLook(25, strike), Sixty()), out=folder, device="cpu")
    except StoppedError as error:
        said, status = str(error), error.exit_status
    result = fit(order(), network(), (Sixty(), Sixty()), out=folder, device="cpu", resume=True)
    return said, status, result.weights_sha256


class _StrikeAtLook(Sixty):
    """Strikes at the n-th look at any image."""

    def __init__(self, looks: int, strike: Callable[[], Any] | None) -> None:
        super().__init__(strike=strike)
        self.looks = looks

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.looks -= 1
        if self.looks == 0 and self.strike is not None:
            self.strike()
        return super().__getitem__(index)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_the_resumed_run_has_the_same_bits(tmp_path: Path, number: signal.Signals) -> None:
    whole = fit(order(), network(), (Sixty(), Sixty()), device="cpu")
    said, status, sha = interrupt(number, 0, str(tmp_path))
    assert said.startswith(f"Stopped by {number.name} after step ")
    assert status == 128 + number
    assert sha == whole.weights_sha256
    assert any(note.startswith("Resumed at step") for note in read_run(tmp_path).notes)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(world: Callable[[int], World], tmp_path: Path) -> None:
    results = world(2).run(interrupt, signal.SIGTERM, 1, str(tmp_path))
    assert results[0] == results[1]
    assert results[0][0].startswith("Stopped by SIGTERM after step ")


def test_a_thread_is_seen_where_it_stands_while_it_runs() -> None:
    over, ready = threading.Event(), threading.Event()

    def deep(depth: int) -> int:
        return deep(depth - 1) + 1 if depth else len([None] * 100)

    def work() -> None:
        ready.set()
        while not over.is_set():
            deep(50)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        with tempfile.TemporaryFile() as scratch:
            seen = [innermost(thread.ident or 0, scratch) for _ in range(300)]
    finally:
        over.set()
        thread.join()
    assert all(len(frames) == 2 for frames in seen)
    assert any(frames[0].startswith("deep line ") for frames in seen)


class Spin(nn.Module):
    """Computes as long again as `seconds` on rank 1."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        end = time.thread_time() + self.seconds * (2 if rank() == 1 else 1)
        while time.thread_time() < end:  # thread time, so that a busy machine slows no rank more than another
            pass
        return x


def train_slowly(folder: str) -> int:
    # 2 forwards of 5 ms a step and rank, twice that on rank 1
    return fit(order(epochs=10), network(Spin(0.005)), (Sixty(), Sixty()), out=folder, device="cpu").steps


def test_a_rank_slowed_by_half_is_named_within_50_steps(world: Callable[[int], World], tmp_path: Path) -> None:
    assert world(2).run(train_slowly, str(tmp_path)) == [50, 50]
    (note,) = [note for note in read_run(tmp_path).notes if "the whole run waits for it" in note][:1]
    assert note.startswith("Rank 1 takes ")
    assert "(in computing)" in note


class Break(nn.Module):
    """Gives infinities at the n-th training forward of this rank."""

    def __init__(self, forwards: int, on_rank: int) -> None:
        super().__init__()
        self.forwards, self.on_rank, self.broken = forwards, on_rank, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or rank() != self.on_rank:
            return x
        self.forwards -= 1
        self.broken = self.broken or self.forwards == 0
        return x / 0 if self.forwards == 0 or (self.broken and not torch.is_grad_enabled()) else x


def break_run(on_rank: int, folder: str, nonfinite: str) -> tuple[str, int]:
    config = order(nonfinite=nonfinite)
    # two rehearsal forwards where there are several ranks; step 7 is in the second epoch
    forwards = 4 * 6 + 1 if not torch.distributed.is_initialized() else 2 + 2 * 6 + 1
    try:
        result = fit(config, network(Break(forwards, on_rank)), (Sixty(), Sixty()), out=folder, device="cpu")
    except RunError as error:
        return str(error), 0
    assert result.loss == result.loss, "the loss of the end is not finite"
    return "finished", result.facts["skipped_steps"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_breaks_names_step_rate_and_layer(
    world: Callable[[int], World], tmp_path: Path, ranks: int
) -> None:
    results = [break_run(0, str(tmp_path), "stop")] if ranks == 1 else world(2).run(break_run, 1, str(tmp_path), "stop")
    for said, _ in results:
        assert said.startswith("The gradient is not finite at step 7 (learning rate 0.05), first in the output of 2 ")
        assert f"on rank {ranks - 1}; lower lr.base" in said
        assert "silent" not in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_breaks_is_skipped_and_counted(world: Callable[[int], World], tmp_path: Path, ranks: int) -> None:
    results = [break_run(0, str(tmp_path), "skip")] if ranks == 1 else world(2).run(break_run, 1, str(tmp_path), "skip")
    assert results == [("finished", 1)] * ranks
    assert read_run(tmp_path).result["skipped_steps"] == 1


def test_skipped_steps_are_counted_across_an_interruption(tmp_path: Path) -> None:
    config = order(nonfinite="skip")
    fit(config, network(Break(25, 0)), (Sixty(), Sixty()), out=tmp_path, device="cpu", max_steps=12)
    result = fit(config, network(Break(0, 0)), (Sixty(), Sixty()), out=tmp_path, device="cpu", resume=True)
    assert result.facts["skipped_steps"] == 1


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = order(checkpoint=CheckpointConfig(every=1, seconds=3600, keep=100))
    steady = fit(config, network(), (Sixty(), Sixty()), out=tmp_path / "steady", device="cpu")
    chance = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: chance.uniform(-1e10, 1e10))
    monkeypatch.setattr(time, "time_ns", lambda: int(chance.uniform(-1e19, 1e19)))
    jumping = fit(config, network(), (Sixty(), Sixty()), out=tmp_path / "jumping", device="cpu")
    assert jumping.weights_sha256 == steady.weights_sha256
    assert 0 <= jumping.seconds < 60
    for folder in ("steady", "jumping"):
        names = sorted(path.name for path in (tmp_path / folder / "checkpoints").iterdir())
        assert names == [f"step-{step:09d}.ckpt" for step in range(5, 31, 5)]
    rows = read_run(tmp_path / "jumping").train
    assert all(row["images_per_s"] > 0 for row in rows)
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
