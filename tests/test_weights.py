"""Trained weights can be used: loaded by name, by other tools, and as a program of its own."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bigstep
from bigstep import recipes
from bigstep.cli import app
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.engine.weights import FILE
from bigstep.errors import ConfigError, DataError

SETTINGS = ["data.holdout=0.97", "workers.count=2", "workers.local_batch=16", "epochs=1"]


def evaluated(model: nn.Module, holdout: float, seed: int) -> float:
    """The accuracy of a model on the held-out images, by hand."""
    from bigstep.data.feed import Feed, Request

    feed = Feed(open_data("embedded", "", holdout=holdout, seed=seed).test, train=False, seed=seed)
    right = total = 0
    with torch.no_grad():
        for inputs, target in feed(Request(0, indices) for indices in feed.evaluation_batches(250)):
            right += int((model(inputs).argmax(1) == target).sum())
            total += len(target)
    feed.close()
    return right / total


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A network with batch norm, trained a little."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = apply_settings(recipes.load("plain"), [*SETTINGS, "model=small"])
    return folder, bigstep.fit(config, out=folder, device="cpu").facts


def test_a_loaded_model_has_the_accuracy_that_was_recorded(run: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = run
    model, config = bigstep.load(folder)
    assert config.model == "small"
    assert facts["model"] == str(folder / FILE)
    assert evaluated(model, config.data.holdout, config.seed) == pytest.approx(facts["accuracy"], abs=1e-9)


def test_any_tool_reads_the_weights_under_the_module_s_names(run: tuple[Path, dict[str, Any]]) -> None:
    from safetensors.torch import load_file

    from bigstep.models import build_model

    fresh = build_model("small", classes=10, channels=1, image_size=28)
    assert not fresh.load_state_dict(load_file(run[0] / FILE), strict=True).missing_keys


def test_own_models_are_kept_but_not_built(tmp_path: Path) -> None:
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    config = apply_settings(
        recipes.load("plain"), ["workers.count=2", "workers.local_batch=4", "epochs=1", "data.augment=none"]
    )
    model = nn.Linear(3, 1)
    bigstep.fit(config, model, (data, data), nn.functional.mse_loss, out=tmp_path / "run", device="cpu")
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "run" / FILE)["weight"], model.weight)
    with pytest.raises(ConfigError, match="a model of your own"):
        bigstep.load(tmp_path / "run")


def test_tied_weights_are_written_under_each_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from bigstep.engine.weights import save_weights

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    save_weights(model, tmp_path)
    assert sorted(load_file(tmp_path / FILE)) == ["0.weight", "1.weight"]


def test_a_run_without_weights_or_with_torn_ones_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no model.safetensors.*give the folder of a run"):
        bigstep.load(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(DataError, match=r"finish it with `bigstep train --resume --out"):
        bigstep.load(tmp_path)
    (tmp_path / FILE).write_bytes(b"torn")
    with pytest.raises(DataError, match="cannot be read"):
        bigstep.load(tmp_path)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11, of what it reads
@pytest.mark.parametrize("suffix", ["safetensors", "pt", "pt2"])
def test_export_gives_the_same_answers(
    suffix: str, run: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"model.{suffix}"
    app(["export", str(run[0]), str(target), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["bytes"] == target.stat().st_size
    images = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    model = bigstep.load(run[0]).model
    expected = model(images)
    if suffix == "pt2":
        assert torch.allclose(torch.export.load(target).module()(images), expected, atol=1e-5)
        return
    from safetensors.torch import load_file

    from bigstep.models import build_model

    fresh = build_model("small", classes=10, channels=1, image_size=28).eval()
    fresh.load_state_dict(torch.load(target, weights_only=True) if suffix == "pt" else load_file(target))
    assert torch.equal(fresh(images), expected)


def test_export_refuses_what_it_cannot_write(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in one of \.safetensors"):
        app(["export", str(run[0]), str(tmp_path / "model.h5")], standalone_mode=False)


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "pt2"])
def test_an_export_that_fails_is_one_sentence_and_leaves_what_was_there(
    suffix: str, run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    target = tmp_path / f"model.{suffix}"
    target.write_text("a month of work")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then it is an error, as a full disk is
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
    try:
        with pytest.raises(ConfigError, match=rf"model.{suffix} cannot be written \(.*\); name another file"):
            app(["export", str(run[0]), str(target), "--force"], standalone_mode=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert target.read_text() == "a month of work"


class Odd(nn.Module):
    """Modules may keep more than tensors of their own memory: other state, views of one tensor, whole numbers first."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        shared = torch.arange(10)
        self.register_buffer("all", shared)
        self.register_buffer("some", shared[3:])
        self.linear = nn.Linear(784, classes)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1))  # type: ignore[no-any-return]


def test_state_that_is_no_tensor_of_its_own_neither_ends_a_run_nor_hinders_loading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGSTEP_TRUST", "1")
    config = apply_settings(recipes.load("plain"), [*SETTINGS, f"model={__name__}:Odd"])
    facts = bigstep.fit(config, out=tmp_path, device="cpu").facts
    model, _ = bigstep.load(tmp_path)
    assert evaluated(model, config.data.holdout, config.seed) == pytest.approx(facts["accuracy"], abs=1e-9)
    assert model.some.tolist() == list(range(3, 10))


class Rows(nn.Linear):
    """Takes vectors of eight numbers; what it is trained on has as many channels as a picture of eight by eight."""

    def __init__(self) -> None:
        super().__init__(8, 3)


class Branches(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)  # type: ignore[no-any-return]


def vectors() -> Any:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return (x, x[:, :3].argmax(1)), (x, x[:, :3].argmax(1))


def test_a_program_takes_what_the_network_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGSTEP_TRUST", "1")
    settings = ["workers.count=2", "workers.local_batch=4", "epochs=1", "data.augment=none"]
    for name in ("Rows", "Branches"):
        config = apply_settings(
            recipes.load("plain"), [*settings, f"model={__name__}:{name}", f"data.name={__name__}:vectors"]
        )
        bigstep.fit(config, out=tmp_path / name, device="cpu")
    app(["export", str(tmp_path / "Rows"), str(tmp_path / "rows.pt2")], standalone_mode=False)
    x = vectors()[0][0][:5]
    found = torch.export.load(tmp_path / "rows.pt2").module()(x)
    assert torch.allclose(found, bigstep.load(tmp_path / "Rows").model(x), atol=1e-6)
    with pytest.raises(ConfigError, match="cannot export the model .* as a program .* export its weights alone"):
        app(["export", str(tmp_path / "Branches"), str(tmp_path / "branches.pt2")], standalone_mode=False)
