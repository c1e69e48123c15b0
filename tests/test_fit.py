"""`fit` is open: recipes by name, own optimizers, metrics and observers; and its record says what was really used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bigstep.config import LrConfig, RunConfig, WorkersConfig
from bigstep.engine.observers.base import Observer
from bigstep.errors import ConfigError
from bigstep.records import read_run
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
        self.steps, self.reached = 0, {}

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
    first, second = (read_run(tmp_path / name) for name in ("0", "1"))
    assert first.result["weights_sha256"] == second.result["weights_sha256"]
    with_sgd = fit(CONFIG, Net(), (data, data), nn.functional.mse_loss, device="cpu")
    assert with_sgd.weights_sha256 != first.result["weights_sha256"], "the optimizer that was given is the one used"


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


def test_a_recipe_or_a_file_by_name(tmp_path: Path) -> None:
    text = "workers: {count: 4, local_batch: 4}\nepochs: 2\nlr: {base: 0.05, scaling: none}\n"
    (tmp_path / "run.yaml").write_text(text)
    data = samples()
    runs = [fit(c, Net(), (data, data), nn.functional.mse_loss, device="cpu") for c in (tmp_path / "run.yaml", CONFIG)]
    assert runs[0].weights_sha256 == runs[1].weights_sha256
    assert fit("plain", max_steps=1, device="cpu").steps == 1
    with pytest.raises(ConfigError, match="neither a recipe .*sony.* nor a YAML file"):
        fit("sonny")
