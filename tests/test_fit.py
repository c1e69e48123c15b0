"""`fit` is open: recipes by name, own optimizers, metrics and observers; and its record says what was really used."""

from __future__ import annotations

import dataclasses
import functools
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bigstep.config import LrConfig, RunConfig, WorkersConfig
from bigstep.engine.interruption import StoppedError
from bigstep.engine.observers.base import Observer
from bigstep.errors import ConfigError
from bigstep.records import read_run
from bigstep.report.gather import gather
from bigstep.report.study import study_of
from bigstep.train import fit

CONFIG = RunConfig(workers=WorkersConfig(count=4, local_batch=4), epochs=2, lr=LrConfig(base=0.05, scaling="none"))


class Net(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(3, 1)


def samples() -> TensorDataset:
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]))


def worst(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().max()


class Listener(Observer):
    def __init__(self) -> None:
        self.steps, self.reached, self.notes = 0, {}, []

    def noted(self, text: str, **facts: Any) -> None:
        self.notes.append(text)

    def row(self, row: Mapping[str, Any]) -> None:
        self.steps += 1

    def evaluated(self, row: Mapping[str, Any]) -> None:
        self.reached = dict(row)


def test_own_optimizer_metrics_and_observers_take_part(tmp_path: Path) -> None:
    data, heard = samples(), Listener()
    for number, optimizer in enumerate((torch.optim.Adam, None)):
        model = Net()
        given = optimizer or torch.optim.Adam(model.parameters())  # what makes one, or one that is there
        result = fit(
            CONFIG, model, (data, data), nn.functional.mse_loss, optimizer=given, metrics={"worst": worst},
            observers=[heard], out=tmp_path / str(number), device="cpu",
        )  # fmt: skip
        assert heard.reached["worst"] == result.facts["worst"] > 0
    assert heard.steps == 2 * 8
    assert "custom · Net on TensorDataset (64 and 64 samples) · batch 16" in heard.notes[0]
    first, second = (read_run(tmp_path / name) for name in ("0", "1"))
    assert first.result["weights_sha256"] == second.result["weights_sha256"]
    with_sgd = fit(CONFIG, Net(), (data, data), nn.functional.mse_loss, device="cpu")
    assert with_sgd.weights_sha256 != first.result["weights_sha256"], "the optimizer that was given is the one used"


def test_gradients_of_parameters_that_an_own_optimizer_leaves_out_do_not_add_up() -> None:
    """Clipping takes the norm of all gradients: those of steps before would shrink every step more and more."""
    data, ends = samples(), []
    for mends in (False, True):
        model = Net()
        model.aside = nn.Parameter(torch.zeros(1))

        def loss(output: Tensor, target: Tensor, net: nn.Module = model) -> Tensor:
            return nn.functional.mse_loss(output, target) + net.aside.sum()

        class Sees(Observer):
            def stepped(self, *_: object, net: nn.Module = model, **__: object) -> tuple[()]:
                net.aside.grad = None
                return ()

        optimizer = torch.optim.SGD([model.weight, model.bias])
        config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, clip=0.1))
        fit(config, model, (data, data), loss, optimizer=optimizer, observers=[Sees()] if mends else [], device="cpu")
        ends.append(model.weight.detach())
    assert torch.equal(*ends)


def test_the_record_says_what_was_used(tmp_path: Path) -> None:
    data = samples()
    fit(CONFIG, Net(), (data, data), nn.functional.mse_loss, out=tmp_path / "run", device="cpu")
    used = read_run(tmp_path / "run").facts["used"]
    assert used == {
        "unit": "samples",
        "model": "Net",
        "parameters": 4,
        "data": "TensorDataset (64 and 64 samples)",
        "loss": "mse_loss",
    }


def test_different_tasks_are_never_one_group_with_a_band_of_seeds(tmp_path: Path) -> None:
    """Two networks and two labellings of one class and size each, under seeds of their own; one is then repeated."""
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    first, second = ((inputs[:, column] > 0).long() for column in (0, 1))

    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2))

    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    cross_entropy = nn.functional.cross_entropy
    smoothed = functools.partial(cross_entropy, label_smoothing=0.1)
    tasks = [(small, first, None), (large, first, None), (small, second, None), (small, first, smoothed)]
    for seed, (network, labels, loss) in enumerate([*tasks, tasks[0]]):
        data = TensorDataset(inputs, labels)
        config = dataclasses.replace(CONFIG, seed=seed)
        fit(config, network(), (data, data), loss, out=tmp_path / str(seed), device="cpu")
    study = study_of(gather([tmp_path]))
    assert sorted(group.n for group in study.groups) == [1, 1, 1, 2], [group.label for group in study.groups]
    labels = [group.label for group in study.groups]
    assert sum("parameters 26" in label for label in labels) == 1
    assert sum("loss cross_entropy" in label for label in labels) == 1
    assert len(study.leaders) == 2, "accuracies on two labellings do not compare"
    assert study.unit == "samples"
    said = " ".join(study.sentences())
    assert "images" not in said
    assert "small" not in said


class Impatient(Observer):
    """Presses Ctrl-C in the second step; the run hears it at the end of the epoch, of four steps."""

    def stepped(self, step: Any, outcome: Any, *, pausing: bool) -> tuple[()]:
        if step.position.step == 1:
            signal.raise_signal(signal.SIGINT)
        return ()


def test_a_run_that_ctrl_c_ends_is_stopped_and_not_failed_until_it_goes_on(tmp_path: Path) -> None:
    data, out = samples(), tmp_path / "run"
    given = (CONFIG, Net(), (data, data), nn.functional.mse_loss)
    with pytest.raises(StoppedError, match="Stopped by SIGINT after step 4"):
        fit(*given, observers=[Impatient()], out=out, device="cpu")
    stopped = study_of(gather([tmp_path]))
    assert (stopped.groups[0].stopped, stopped.groups[0].failures) == (1, 0)
    assert "Stopped by SIGINT" in " ".join(stopped.sentences())
    fit(*given, out=out, resume=True, device="cpu")
    assert study_of(gather([tmp_path])).outcomes[0].status == "finished"


def test_a_run_without_classes_is_reported_by_its_loss(tmp_path: Path) -> None:
    data = samples()
    result = fit(CONFIG, Net(), (data, data), nn.functional.mse_loss, out=tmp_path / "run", device="cpu")
    study = study_of(gather([tmp_path]))
    loss = f"{result.facts['eval_loss']:.4g}"
    assert study.title.startswith(f"custom: loss {loss} in ")
    assert f"Its loss on the evaluation set was {loss} after" in " ".join(study.sentences())
    assert "“Net” on “TensorDataset (64 and 64 samples)”" in study.sentences()[0]


def test_a_recipe_or_a_file_by_name(tmp_path: Path) -> None:
    text = "workers: {count: 4, local_batch: 4}\nepochs: 2\nlr: {base: 0.05, scaling: none}\n"
    (tmp_path / "run.yaml").write_text(text)
    data = samples()
    runs = [fit(c, Net(), (data, data), nn.functional.mse_loss, device="cpu") for c in (tmp_path / "run.yaml", CONFIG)]
    assert runs[0].weights_sha256 == runs[1].weights_sha256
    assert fit("plain", max_steps=1, device="cpu").steps == 1
    with pytest.raises(ConfigError, match="neither a recipe .*sony.* nor a YAML file"):
        fit("sonny")


def test_the_median_of_the_last_five_epochs_is_in_the_result(tmp_path: Path) -> None:
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.argmax(1))
    model = nn.Linear(3, 3)
    result = fit(replace(CONFIG, epochs=7), model, (data, data), nn.CrossEntropyLoss(), out=tmp_path, device="cpu")
    run = read_run(tmp_path)
    accuracies = [row["accuracy"] for row in run.evaluations]
    assert len(set(accuracies)) > 2, "a run that moves, else this shows nothing"
    assert result.facts["accuracy_last5"] == run.result["accuracy_last5"] == sorted(accuracies[-5:])[2]
    assert result.accuracy == accuracies[-1]
