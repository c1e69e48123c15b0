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
from bigstep.errors import ConfigError, DataError
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


class Turned(Net):
    """Its inputs are turned in the complex plane first, as rotary embeddings do, by a weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.complex64) * 1j)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward((inputs * self.angles * self.gain).real)


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.complex64), ("float64", torch.complex128)])
def test_complex_weights_and_buffers_stay_complex(tmp_path: Path, precision: Any, dtype: torch.dtype) -> None:
    data, model = samples(), Turned()
    order, angles = replace(CONFIG, precision=precision), model.angles.clone()
    result = fit(order, model, (data, data), nn.functional.mse_loss, out=tmp_path / "run", device="cpu")
    torch.testing.assert_close(model.angles, angles.to(dtype), rtol=0, atol=0)
    assert model.gain.dtype == dtype
    assert result.facts["eval_loss"] < 1


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


@pytest.mark.parametrize(
    "given, words",
    [
        ({"config": {"epochs": 1}}, "neither a recipe"),
        ({"model": Net}, "give a module, as in fit"),
        ({"model": "resnet18"}, "give a module, as in fit"),
        ({"device": "tpu"}, "one of auto, cpu, cuda, shared"),
        ({"model": Net().requires_grad_(False)}, "Net has no parameter that can be trained"),
        ({"model": nn.LazyLinear(1)}, "LazyLinear has parameters that have no shape yet"),
        ({"data": "embedded"}, "leave it out, and set data.name or data.path"),
        ({"data": Path("images")}, "leave it out, and set data.name or data.path"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS asks for the loss several times in a step"),
        ({"loss": nn.MSELoss(reduction="none")}, r"The loss gave a tensor of \(4, 1\), but it must give its mean"),
        ({"loss": lambda output, target: 1.0}, "The loss gave a float, but it must give its mean"),
        ({"loss": lambda output, target: (output.detach() - target).mean()}, "a number that depends on no weight"),
    ],
)
def test_what_fit_cannot_use_is_named_before_anything_starts(given: dict[str, Any], words: str) -> None:
    usual = {"config": CONFIG, "model": Net(), "data": (samples(), samples()), "loss": nn.functional.mse_loss}
    with pytest.raises(ConfigError, match=words):
        fit(**{**usual, **given})


def test_progress_counts_the_steps_after_which_fit_is_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    data = (samples(), samples())
    fit(CONFIG, Net(), data, nn.functional.mse_loss, max_steps=2, progress=True, device="cpu")
    assert "step 2/2" in capsys.readouterr().err


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


@pytest.mark.parametrize("asked", [0, -1, 1.5])
def test_a_number_of_steps_that_is_none_is_refused(asked: float) -> None:
    data = samples()
    with pytest.raises(ConfigError, match="max_steps=.* whole number of at least 1"):
        fit(CONFIG, Net(), (data, data), nn.functional.mse_loss, max_steps=asked, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [3, 5, None])
def test_a_run_that_has_taken_enough_steps_takes_no_more_and_keeps_its_loss(asked: int | None, tmp_path: Path) -> None:
    data, config = samples(), CONFIG if asked else replace(CONFIG, epochs=1.25)  # five steps
    given = {"loss": nn.functional.mse_loss, "out": tmp_path, "device": "cpu"}
    first = fit(config, Net(), (data, data), max_steps=5, **given)
    again = fit(config, Net(), (data, data), max_steps=asked, resume=True, **given)
    assert (again.steps, again.weights_sha256) == (5, first.weights_sha256)
    assert again.loss == pytest.approx(first.loss) == pytest.approx(read_run(tmp_path).result["loss"])


@pytest.mark.parametrize("name", ["kind", "step", "loss"])
def test_a_metric_cannot_take_the_name_of_what_every_row_or_result_tells(name: str, tmp_path: Path) -> None:
    data = samples()
    with pytest.raises(ConfigError, match=f"a metric '{name}'.*choose another name"):
        fit(CONFIG, Net(), (data, data), nn.functional.mse_loss, metrics={name: worst}, out=tmp_path, device="cpu")


def test_every_name_of_a_row_or_result_is_reserved(tmp_path: Path) -> None:
    from bigstep.engine.measures import RESERVED

    data, heard = samples(), Listener()
    result = fit(CONFIG, Net(), (data, data), nn.functional.mse_loss, observers=[heard], out=tmp_path, device="cpu")
    assert result.facts.keys() | heard.reached.keys() == (RESERVED | {"accuracy", "eval_loss"}) - {"plan"}


def test_gradients_that_cannot_be_exchanged_are_refused_with_the_layer_that_makes_them() -> None:
    words = torch.randint(9, (64, 2), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(words, words[:, 0])
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 9))
    with pytest.raises(ConfigError, match=r"0 \(Embedding\) has sparse gradients.*sparse=False"):
        fit(CONFIG, model, (data, data), nn.CrossEntropyLoss(), device="cpu")


def test_an_optimizer_of_another_network_is_refused() -> None:
    data, other = samples(), Net()
    with pytest.raises(ConfigError, match="The SGD that fit was given holds no parameter of the model"):
        fit(
            CONFIG,
            Net(),
            (data, data),
            nn.functional.mse_loss,
            optimizer=torch.optim.SGD(other.parameters()),
            device="cpu",
        )


class Counts(Listener):
    """Carries how many steps it has heard of, under a name that the run has a part of as well."""

    def stepped(self, *_: object, **__: object) -> tuple[()]:
        self.steps += 1
        return ()

    def parts(self) -> dict[str, Any]:
        return {"model": self}

    def row(self, row: Mapping[str, Any]) -> None:
        pass

    def state_dict(self) -> int:
        return self.steps

    def load_state_dict(self, state: int) -> None:
        self.steps = state


def test_what_an_own_observer_carries_is_kept_with_the_run(tmp_path: Path) -> None:
    data, before, after = samples(), Counts(), Counts()
    for most, resume, observers in ((3, False, [before]), (5, True, [after]), (None, True, [])):
        result = fit(
            CONFIG, Net(), (data, data), nn.functional.mse_loss, out=tmp_path, max_steps=most, resume=resume,
            observers=observers, device="cpu",
        )  # fmt: skip
    assert (before.steps, after.steps, result.steps) == (3, 5, 8), "and a run goes on without it"


@pytest.mark.parametrize("end", ["train", "test"])
def test_an_empty_data_set_is_named_whatever_holds_it(end: str) -> None:
    data, nothing = samples(), torch.utils.data.Subset(samples(), [])
    with pytest.raises(DataError, match="data gave an empty data set"):
        fit(CONFIG, Net(), (nothing, data) if end == "train" else (data, nothing), nn.functional.mse_loss, device="cpu")


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.bool])
def test_labels_may_be_whole_numbers_of_any_type(kind: torch.dtype) -> None:
    x, ends = samples().tensors[0], []
    labels = (x.sum(1) > 0).long()
    for y in (labels, labels.to(kind)):
        torch.manual_seed(0)
        ends.append(fit(CONFIG, nn.Linear(3, 2), ((x, y), (x, y)), device="cpu").weights_sha256)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("device", ["tpu", "cuda:0", torch.device("cpu")])
def test_a_device_is_one_of_four_words(device: Any) -> None:
    data = samples()
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda, shared"):
        fit(CONFIG, Net(), (data, data), nn.functional.mse_loss, device=device)
