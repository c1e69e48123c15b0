"""On a GPU the host runs ahead of the device: what makes it wait within steps, counted on a GPU that is pretended.

A wait in every step costs more than the work that the host does meanwhile, and no test on a CPU sees it. So the loop is
run as on a GPU (`pretended`), and each step is held to what it is meant to wait for.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from bigstep.config import IslandsConfig, RunConfig
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.data.sampler import Step
from bigstep.engine import evaluate, meter, run
from bigstep.engine.interruption import StoppedError, StopRequest
from bigstep.engine.meter import Flush
from bigstep.engine.methods.base import Note, Outcome
from bigstep.engine.methods.meeting import Meeting
from bigstep.engine.methods.rounds import Rounds
from bigstep.engine.observers.base import Observer
from bigstep.engine.state import Count
from bigstep.exchange.codecs import Blocks
from bigstep.exchange.codecs.layout import lay_out
from bigstep.recipes import load
from bigstep.tables import load as load_object
from bigstep.tables.codecs import CODECS, fill_settings
from bigstep.train import fit
from pretended import Machine, pretended

WORKERS, LOCAL, TOKENS, VOCABULARY = 4, 4, 8, 16
BATCH, STEPS = WORKERS * LOCAL, 8
SMALL = (
    f"workers.count={WORKERS}", f"workers.local_batch={LOCAL}", "checkpoint.every=0", "checkpoint.seconds=0",
    "data.augment=none", "norm.zero_gamma=false", "evaluate_every=1000",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BIGSTEP_DATA", str(tmp_path))
    monkeypatch.setattr(meter, "_SECONDS_BETWEEN_FLUSHES", 1e9)  # as far apart as they may be, however slow this is


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))


class Text(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY))


def images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(0)
    x, y = torch.rand(STEPS * BATCH + 8, 1, 6, 6, generator=chance), torch.randint(10, (STEPS * BATCH + 8,))
    return (x[8:], y[8:]), (x[:8], y[:8])


def text() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH + 8, TOKENS + 1), generator=chance)
    x, y = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    y[3, 5:] = -100  # padding: targets of a batch are counted
    return (x[8:], y[8:]), (x[:8], y[:8])


class Waits(Observer):
    """Notes what the host has waited for, step by step."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.steps = machine, list[list[str]]()

    def stepped(self, step: Step, outcome: Outcome, *, pausing: bool) -> tuple[Note, ...]:
        self.steps.append(list(self._machine.waits))
        self._machine.waits.clear()
        return ()


def waits_of(recipe: str, *settings: str) -> list[list[str]]:
    """What each step of a run waited for, the flush before it included."""
    config: RunConfig = apply_settings(stretch(load(recipe), 1.0), (*SMALL, *settings))
    of_text = recipe in ("adamw", "diloco")
    with pretended() as machine:
        watch = Waits(machine)
        fit(config, Text() if of_text else network(), text() if of_text else images(), observers=[watch], device="cuda",
            progress=False)  # fmt: skip
    return watch.steps


AUTO = ("plan=auto", "growth.most=4", "growth.every=1", "growth.measured=3")
ISLANDS = ("islands.count=2", "islands.every=2", "islands.begin=0")


@pytest.mark.parametrize("kernels", ["graphs", "plain"])
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("plain", ()),
        ("plain", ("optimizer.clip=1",)),
        ("plain", ("precision=fp16",)),
        ("lars", ("plan=[]",)),
        ("leap", ("plan=[]",)),
        ("leap", AUTO),
        ("adamw", ()),
        ("diloco", ISLANDS),
    ],
    ids=str,
)
def test_a_step_waits_for_nothing(recipe: str, settings: tuple[str, ...], kernels: str) -> None:
    """The first prepares, and its loss is told at once; behind that the host runs ahead."""
    steps = waits_of(recipe, f"kernels={kernels}", *settings)
    assert len(steps) == STEPS
    assert steps[2:] == [[]] * (STEPS - 2)


def test_a_step_that_is_to_be_skipped_waits_to_know_it() -> None:
    steps = waits_of("plain", "kernels=plain", "nonfinite=skip")
    assert steps[2:] == [["engine/diagnosis.py, gradients_are_finite: reads a value"]] * (STEPS - 2)


def test_what_other_streams_are_at_is_not_waited_for_where_losses_are_read() -> None:
    """Batches to come are on their way in one, a mean of islands in another."""
    steps = waits_of("plain", "kernels=plain")
    assert "exchange/clock.py, seconds_since: waits for a step" in steps[1]
    assert not [wait for step in steps for wait in step if "its stream" in wait]
    assert not [wait for step in steps for wait in step if "all streams" in wait]


class Told(Observer):
    """Notes the losses of each flush, and asks the run to stop behind a step."""

    def __init__(self, stop: StopRequest, behind: int = 0) -> None:
        self._stop, self._behind = stop, behind
        self.losses = list[dict[int, float]]()

    def stepped(self, step: Step, outcome: Outcome, *, pausing: bool) -> tuple[Note, ...]:
        if step.position.step + 1 == self._behind:
            self._stop.number = signal.SIGTERM
        return ()

    def flushed(self, flush: Flush) -> tuple[Note, ...]:
        assert flush.rows[-1]["step"] == flush.step.position.step + 1
        self.losses.append({row["step"]: row["loss"] for row in flush.rows})
        return ()


def told_on(device: str, monkeypatch: pytest.MonkeyPatch, *settings: str, **options: Any) -> list[dict[int, float]]:
    """The losses of each flush of a run, in which at most three steps gather."""
    monkeypatch.setattr(meter, "_MOST_STEPS_BETWEEN_FLUSHES", 3)
    config = apply_settings(stretch(load("plain"), 1.0), (*SMALL, "kernels=plain", *settings))
    told = Told(stop := StopRequest(), **options)
    monkeypatch.setattr(run, "listening", lambda: contextlib.nullcontext(stop))
    with pretended() if device == "cuda" else contextlib.nullcontext(), contextlib.suppress(StoppedError):
        torch.manual_seed(0)
        fit(config, network(), images(), observers=[told], device=device, progress=False)
    return told.losses


def test_a_gpu_that_is_alone_has_a_step_to_do_while_others_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu, on_cpu = (told_on(device, monkeypatch) for device in ("cuda", "cpu"))
    assert [list(each) for each in on_cpu] == [[1], [2, 3, 4], [5, 6, 7], [8]]
    assert [list(each) for each in on_gpu] == [[1], [2, 3], [4, 5], [6, 7, 8]], "each step is told of once, in order"
    assert dict(pair for each in on_gpu for pair in each.items()) == pytest.approx(
        dict(pair for each in on_cpu for pair in each.items()), rel=1e-5
    )  # in float32; a loss beside the wrong step would differ by a tenth


@pytest.mark.parametrize("way", ["stopped", "saved"])
def test_all_steps_are_told_of_where_a_run_is_saved_on_the_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on from there tells of the next. No step is told of by itself: its time would be the flush's."""
    stopped = way == "stopped"
    settings, options = ((), {"behind": 3}) if stopped else (("checkpoint.seconds=1e-6",), {})
    on_gpu = told_on("cuda", monkeypatch, *settings, **options)
    assert [list(each) for each in on_gpu] == [[1], [2, 3, 4], [5, 6, 7], [8]][: 2 if stopped else None]


def test_a_meeting_waits_for_what_its_islands_compute_and_not_for_another_that_is_on_its_way() -> None:
    with pretended() as machine:
        ranks = mock.Mock(size=2, device=torch.device("cuda", 0), sum_=lambda told: told)
        island = mock.Mock(number=1, samples=[0, 7], method=mock.Mock(skipped=Count()))
        island.method.skipped.value = 3
        rounds = Rounds(
            IslandsConfig(count=2), [island], mock.Mock(fragments=[0, 1]), mock.Mock(), ranks, Count(), mock.Mock(), 0,
            keeps=False,
        )  # fmt: skip
        assert rounds._samples_of_all(1) == [0, 7]
    assert rounds._skipped.value == 3
    assert [wait.split(": ")[1] for wait in machine.waits] == [
        "copies to the device", "waits for its stream", "reads values",
    ]  # fmt: skip


def test_whoever_waits_for_a_meeting_hears_of_a_device_that_has_failed() -> None:
    line = mock.Mock()
    line.stream.record_event.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pretended():
        meeting = Meeting(iter(()), mock.Mock(), line, [])
    (_, arrive) = line.submit.call_args.args
    with contextlib.suppress(RuntimeError):  # it ends the thread that brings the mean, which nobody looks at
        arrive(None)
    assert meeting._there.is_set()
    with pytest.raises(RuntimeError, match="CUDA error"):
        meeting.wait()


@pytest.mark.parametrize("name", ["int8", "int4", "topk"])
def test_codes_are_written_and_read_without_a_wait_once_their_blocks_are_known(name: str) -> None:
    code, codec = CODECS[name].blocks, load_object(CODECS[name].home)()
    assert code is not None
    lengths = [length for shape in ((3, 5_000), (7,)) for length in code.cut(shape).lengths]
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0))

    def sent(flat: Tensor, blocks: Blocks, length: int) -> Tensor:
        message, out = torch.zeros(length, dtype=torch.uint8, device=flat.device), torch.zeros_like(flat)
        codec.encode(flat, torch.zeros_like(flat), blocks, message)
        codec.decode(message, blocks, out)
        return out

    expected = sent(values, *lay_out(code, lengths, fill_settings({}), torch.device("cpu")))
    with pretended() as machine:
        there, layout = values.to("cuda"), lay_out(code, lengths, fill_settings({}), torch.device("cuda", 0))
        sent(there, *layout)
        machine.waits.clear()
        found = sent(there, *layout)
        assert machine.waits == []
        assert torch.equal(found.cpu(), expected)


def error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


@pytest.mark.parametrize("real", [False, True], ids=["classes", "numbers"])
def test_an_evaluation_waits_once_however_many_batches_it_has(monkeypatch: pytest.MonkeyPatch, real: bool) -> None:
    monkeypatch.setitem(evaluate._SAMPLES_PER_FORWARD, "cuda", 2)  # four batches
    config = apply_settings(stretch(load("plain"), 0.25), (*SMALL, "kernels=plain"))
    (x, y), (test_x, test_y) = images()
    data = ((x, y.float()), (test_x, test_y.float())) if real else ((x, y), (test_x, test_y))
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 1), nn.Flatten(0)) if real else network()
    with pretended() as machine:
        loss, metrics = (nn.MSELoss(), {"error": error}) if real else (None, None)
        fit(config, model, data, loss=loss, metrics=metrics, device="cuda", progress=False)
    told = [wait for wait in machine.waits if "evaluat" in wait or "measures" in wait]
    assert told == ["engine/measures.py, evaluation: reads values"]


def test_the_pretended_gpu_notes_what_a_real_one_waits_for() -> None:
    here = torch.arange(3)
    with pretended() as machine:
        there = here.to("cuda")
        for ask in (float, bool, int):
            ask(there[1])
        there[there > 1], there.nonzero(), there.cpu(), there.tolist(), torch.equal(there, there)  # noqa: B018
        assert len(machine.waits) == 9
        machine.waits.clear()
        torch.empty(3, device="cuda").copy_(here.pin_memory(), non_blocking=True).add_(there).index_select(0, there)
        here.pin_memory().to("cuda", non_blocking=True)
        assert machine.waits == []
        assert (there + 1).is_cuda
        assert torch.zeros_like(there).device.type == "cuda"
        with pytest.raises(RuntimeError, match="same device"):
            there + here
