"""On a GPU the host runs ahead of the device: what makes it wait within steps, counted on a GPU that is pretended.

A wait in every step costs more than the work that the host does meanwhile, and no test on a CPU sees it. So the loop is
run as on a GPU (`pretended`), and each step is held to what it is meant to wait for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigstep.config import RunConfig
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.data.sampler import Step
from bigstep.engine import evaluate, meter
from bigstep.engine.methods.base import Note, Outcome
from bigstep.engine.observers.base import Observer
from bigstep.recipes import load
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
