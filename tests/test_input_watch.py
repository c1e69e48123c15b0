"""A run that waits for its data says so, once, with what to change; one that does not stays silent."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from bigstep.config import DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.data.waits import Waits
from bigstep.engine.meter import Meter, StepCost, measured_on_device
from bigstep.engine.methods.base import Outcome
from bigstep.engine.observers import watches
from bigstep.engine.observers.busy import BusyWatch
from bigstep.engine.observers.watches import InputWatch
from bigstep.engine.ranks import Ranks
from bigstep.records import read_run
from bigstep.train import fit
from pretended import pretended


@pytest.mark.parametrize(
    ("loaders", "cores", "waited_s", "words"),
    [
        (0, 8, 7.0, "no loaders are too few; set data.loaders=2 "),
        (1, 8, 6.5, "1 loader is too few; set data.loaders=3 "),
        (6, 8, 6.0, "6 loaders are too few; set data.loaders=8 "),
        (8, 8, 6.0, "all 8 cores of a rank load already; store smaller images (`bigstep data pack FOLDER OUT --side 2"),
        (2, 8, 2.5, "Waiting for data 21 % of the time"),
    ],
)
def test_the_advice_fits_the_machine(loaders: int, cores: int, waited_s: float, words: str) -> None:
    watch = InputWatch(loaders, cores)
    assert watch.see([waited_s / 2], 6.0) is None  # too early to tell
    sentence = watch.see([waited_s / 2], 6.0)
    assert sentence is not None
    assert words in sentence
    assert watch.see([11.0], 12.0) is None  # once


@pytest.mark.parametrize(
    ("spent", "words"),
    [
        ({"disk": 9.0, "decode": 2.0, "copy": 0.1}, "the disk is the bottleneck"),
        ({"disk": 1.0, "decode": 2.0, "copy": 3.0}, "copying to the device takes longer"),
        ({"disk": 1.0, "decode": 2.0, "copy": 0.1}, "2 loaders are too few"),
        ({"disk": 1.0, "decode": 2.0, "device": 3.0}, "the GPU's own decoders take the time"),
        ({}, "2 loaders are too few"),
    ],
)
def test_the_part_that_takes_longest_is_named(spent: dict[str, float], words: str) -> None:
    watch = InputWatch(2, 8, lambda: spent)
    sentence = watch.see([6.0], 12.0)
    assert sentence is not None
    assert words in sentence


class Moment:
    """A CUDA event, by hand."""

    def __init__(self, at_ms: float, reached: bool = True) -> None:
        self.at_ms, self.reached = at_ms, reached

    def elapsed_time(self, later: Moment) -> float:
        return later.at_ms - self.at_ms

    def query(self) -> bool:
        return self.reached


@pytest.mark.parametrize("device_ms", [2.0, 10.0, 30.0])
def test_waits_are_measured_on_the_device_also_where_the_host_runs_ahead(device_ms: float) -> None:
    """A thread brings a batch every 20 ms, and hands it over before the device has it; the host never waits itself."""
    waits, steps = Waits(torch.device("cpu")), 20
    costs, batches, device, idle = [], [], 0.0, 0.0
    for step in range(steps):
        ready = 20.0 * (step + 1)
        waits.handed(Moment(device), Moment(ready))
        idle += max(0.0, ready - device)
        device = max(device, ready) + device_ms
        costs.append(StepCost(0.0005, 0.0, 0.0))  # the host has queued the step and gone on
        batches.append(len(waits))
    waits.copied(Moment(0.0), Moment(4.0))
    waits.copied(Moment(10.0), Moment(14.0, reached=False))
    seen = measured_on_device(costs, device / 1e3, waits.take(len(waits)), batches)
    assert sum(cost.data_s for cost in seen) == pytest.approx(idle / 1e3)
    assert all(cost.data_s > 0.009 for cost in seen[1:]) == (device_ms <= 10.0)
    assert sum(cost.total_s for cost in seen) == pytest.approx(device / 1e3)
    assert (waits.copy_s, len(waits)) == (pytest.approx(0.004), 0)


def test_what_a_step_has_waited_for_is_not_what_others_have_computed() -> None:
    """Loaders start with an epoch: one step waits for them, and the others do not."""
    costs, waits = [StepCost(0.0005, 0.0, 0.0)] * 10, [0.9, *[0.0] * 9]
    seen = measured_on_device(costs, 1.0, waits, list(range(1, 11)))
    assert [cost.compute_s for cost in seen] == pytest.approx([0.01] * 10)
    assert sum(cost.compute_s + cost.data_s for cost in seen) == pytest.approx(1.0)


def test_a_step_that_is_told_of_later_has_its_own_waits() -> None:
    """Two batches a step; a flush leaves the newest step for the next one, with what it has waited for."""
    waits = Waits(torch.device("cpu"))
    step, told = mock.Mock(size=4), list[float]()
    with pretended():
        device = torch.device("cuda", 0)
        meter = Meter(Ranks(device=device), waits=waits)
        for number in range(1, 6):
            meter.begin()
            for _ in range(2):
                waits.handed(Moment(0.0), Moment(float(number)))
            meter.add(step, Outcome(torch.zeros((), dtype=torch.float64, device=device)), batch=4)
            if number > 2:
                flush = meter.flush([], whole=number == 5, final=False)
                told += [round(1e3 * row["data_s"], 6) for row in flush.rows]
                assert sum(flush.data_by_rank) == pytest.approx(sum(row["data_s"] for row in flush.rows))
    assert told == [2.0, 4.0, 6.0, 8.0, 10.0]
    assert len(waits) == 0


def test_what_is_forgotten_is_kept_nowhere() -> None:
    """An evaluation forgets; events of all its copies would stay on the GPU to the end of the run."""
    waits = Waits(torch.device("cpu"))
    waits.handed(Moment(0.0), Moment(1.0))
    waits.copied(Moment(0.0), Moment(4.0))
    waits.forget()
    assert waits.take(1) == []
    assert waits.copy_s == 0


def test_a_little_waiting_is_no_matter_and_memory_none_at_all() -> None:
    watch = InputWatch(2, 8)
    assert [watch.see([1.0], 6.0) for _ in range(20)] == [None] * 20
    assert watch.see([6.0], 6.0) is None
    assert watch.see([6.0], 6.0) is not None  # the good times before do not hide it
    assert InputWatch(None, 8).see([50.0], 60.0) is None


class Slow:
    """Takes its time for every item."""

    classes = ("even", "odd")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.002)
        return torch.full((1, 4, 4), float(index % 2)), index % 2


def test_a_run_tells_that_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_LONG_ENOUGH_S", 0.05)
    workers, data = WorkersConfig(count=2, local_batch=8), DataConfig(loaders=0)
    config = RunConfig(workers=workers, epochs=2, lr=LrConfig(base=0.1), data=data)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    fit(config, model, (Slow(), Slow()), out=tmp_path, device="cpu")
    told = [note for note in read_run(tmp_path).notes if note.startswith("Waiting for data")]
    assert len(told) == 1
    assert "no loaders are too few; set data.loaders=" in told[0] or "load already" in told[0]


def test_threads_that_others_keep_from_the_cores_are_told_once() -> None:
    watch = BusyWatch(threads=2, rank=0)
    assert watch.see(4.9, 1.0, 6.0, cores=2) is None, "too soon to say"
    said = watch.see(0.2, 0.1, 6.0, cores=2)
    assert said is not None
    assert "OMP_NUM_THREADS=1" in said
    assert watch.see(9.0, 1.0, 6.0, cores=2) is None, "once is enough"


@pytest.mark.parametrize(
    ("threads", "had_s", "load"),
    [(1, 1.0, 6.0), (2, 18.0, 6.0), (2, 1.0, 2.1)],
    ids=["one thread waits for none", "it has the cores", "nobody else is there"],
)
def test_a_run_that_is_not_crowded_says_nothing(threads: int, had_s: float, load: float) -> None:
    assert BusyWatch(threads, rank=0).see(10.0, had_s, load, cores=2) is None
