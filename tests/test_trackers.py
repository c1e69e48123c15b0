"""Rows reach the programs where people watch their runs; those that are not installed are named."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bigstep.engine.observers.trackers import TRACKERS
from bigstep.errors import ConfigError

ROW = {"kind": "train", "step": 3, "epoch": 0.5, "samples": 48, "loss": 0.25, "lr": 0.1, "note": "x"}
STRANGE = {**ROW, "step": 4, "loss": float("nan")}
EVALUATION = {"kind": "eval", "step": 4, "epoch": 1.0, "samples": 96, "accuracy": 0.5}
FACTS = {"name": "first", "tags": ["try"]}


def tell(name: str, folder: Path) -> None:
    tracker = TRACKERS[name](folder, {"lr.base": 0.1, "plan": []}, FACTS)
    tracker.row(ROW)
    tracker.row(STRANGE)
    tracker.evaluated(EVALUATION)
    tracker.noted("Resumed at step 3.")
    assert list(tracker.closed()) == []


def test_the_numbers_of_each_row_arrive_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(48, 0.25)]
    assert [event.value for event in events.Scalars("evaluation/accuracy")] == [0.5]


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_kept_by_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tell("wandb", tmp_path)
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    assert b"train/loss" in content
    assert b"evaluation/accuracy" in content


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_kept_by_mlflow_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'kept'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tell("mlflow", tmp_path)
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.run_name == "first"
    assert run.data.metrics["train/loss"] == 0.25
    assert run.data.metrics["evaluation/accuracy"] == 0.5
    assert run.data.params["lr.base"] == "0.1"


class Recorded(ModuleType):
    """A stand-in for a package that was not installed: remembers what it was called with."""

    def __init__(self, name: str):
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []
        self.summary: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Recorded:
            self.calls.append((name, arguments or options))
            return self

        return call


@pytest.mark.parametrize(("name", "logging"), [("wandb", "log"), ("mlflow", "log_metrics")])
def test_what_is_not_finite_is_left_out_and_the_rest_is_logged(
    name: str, logging: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, module := Recorded(name))
    tell(name, tmp_path)
    logged = [given[0] for call, given in module.calls if call == logging]
    assert logged == [
        {"train/epoch": 0.5, "train/loss": 0.25, "train/lr": 0.1},
        {"train/epoch": 0.5, "train/lr": 0.1},
        {"evaluation/epoch": 1.0, "evaluation/accuracy": 0.5},
    ]


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_package_that_is_missing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ConfigError, match=f"--{name} needs the package {name}; install it or leave out the option."):
        TRACKERS[name](tmp_path, {}, {})
