"""Rows of a run in the programs where people watch their experiments: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bigstep.engine.observers.base import Observer
from bigstep.errors import ConfigError

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "WandB"]


class Tracker(Observer):
    """Passes the numbers of each row on, as kind/name."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Pass on a training row."""
        self.log(_numbers("train", row), row)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Pass on an evaluation row."""
        self.log(_numbers("evaluation", row), row)

    def log(self, numbers: dict[str, float], row: Mapping[str, Any]) -> None:
        """Log numbers; the row says at which step and sample."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Writes events into the folder `tensorboard` of the run, by samples seen."""

    def __init__(self, folder: Path, config: Mapping[str, Any], facts: Mapping[str, Any]):
        summaries = _package("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._writer = summaries.SummaryWriter(str(folder / "tensorboard"))

    def log(self, numbers: dict[str, float], row: Mapping[str, Any]) -> None:
        """Write each number as a scalar."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, row["samples"])

    def closed(self) -> tuple[()]:
        """Write what is pending, and close."""
        self._writer.close()
        return ()


class WandB(Tracker):
    """Starts a run of Weights & Biases; WANDB_PROJECT, WANDB_MODE=offline and the like take effect."""

    def __init__(self, folder: Path, config: Mapping[str, Any], facts: Mapping[str, Any]):
        wandb = _package("wandb", "wandb", "wandb")
        settings = wandb.Settings(silent=True)
        self._run = wandb.init(
            dir=str(folder), name=facts.get("name"), tags=facts.get("tags"), config=dict(config), settings=settings
        )

    def log(self, numbers: dict[str, float], row: Mapping[str, Any]) -> None:
        """Log the numbers at their step."""
        self._run.log(numbers, step=row["step"])

    def noted(self, text: str, **facts: Any) -> None:
        """Keep the last remark in the summary."""
        self._run.summary["note"] = text

    def closed(self) -> tuple[()]:
        """End the run there."""
        self._run.finish()
        return ()


class MLflow(Tracker):
    """Starts a run of MLflow at MLFLOW_TRACKING_URI, or in the file mlflow.db of the run folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any], facts: Mapping[str, Any]):
        self._mlflow = mlflow = _package("mlflow", "mlflow", "mlflow")
        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        mlflow.start_run(run_name=facts.get("name"), tags=dict.fromkeys(facts.get("tags") or (), "yes"))
        mlflow.log_params({name: str(value)[:500] for name, value in config.items()})

    def log(self, numbers: dict[str, float], row: Mapping[str, Any]) -> None:
        """Log the numbers at their step."""
        self._mlflow.log_metrics(numbers, step=row["step"])

    def closed(self) -> tuple[()]:
        """End the run there."""
        self._mlflow.end_run()
        return ()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
"""By the name of the option that asks for it; each is made from the run folder, the configuration and the facts."""


def _package(module: str, package: str, option: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"--{option} needs the package {package}; install it or leave out the option.") from None


def _numbers(kind: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row, except those that only say where it stands."""
    return {
        f"{kind}/{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name not in {"step", "samples"} and math.isfinite(value)
    }
