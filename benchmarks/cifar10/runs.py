"""Runs of `bigstep train` on CIFAR-10 in one process, so that five hundred of them need not start five hundred times.

A run is `bigstep.train.fit` of a recipe's preset `cifar10` with settings, and nothing else; what it gave is one line of
JSON in a file, and a line that is there is not run again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bigstep import recipes
from bigstep.config import RunConfig
from bigstep.config.edit import scale_workers, stretch
from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data
from bigstep.engine.interruption import StoppedError
from bigstep.errors import BigstepError
from bigstep.records import read_run
from bigstep.train import fit

BATCHES = (512, 2048, 8192, 16384, 25000)
LOCAL = 32  # samples of a worker in the largest stage; 25,000 is 781 workers, two steps an epoch
VALIDATION = 0.1
"""Fraction of the training set that a search is judged on."""


@functools.lru_cache(maxsize=4)
def images(folder: str, holdout: float) -> tuple[Any, Any]:
    """The training and evaluation images, on the GPU where there is one; the held-out part is the same for all."""
    pair = open_data("cifar10", folder, holdout, seed=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def moved(part: Any) -> Any:
        return dataclasses.replace(part, images=part.images.to(device), labels=part.labels.to(device))

    return moved(pair.train), moved(pair.test)


def config_of(
    recipe: str, batch: int, settings: tuple[str, ...] = (), epochs: float | None = None, preset_name: str = "cifar10"
) -> RunConfig:
    """The preset at a batch, that of the largest stage of its plan; settings come last.

    In `cifar10` the workers of the largest stage have 32 samples, elsewhere what they have.
    """
    preset = recipes.load(recipe, preset_name)
    stages = [preset.workers, *preset.stages]
    largest = max(stage.local_batch for stage in stages)
    local = LOCAL if preset_name == "cifar10" else largest
    count = batch / local * preset.workers.count / max(stage.count for stage in stages)
    share = local * preset.workers.local_batch / largest
    sizes = (f"workers.count={max(1, round(count))}", f"workers.local_batch={round(share)}")
    quiet = ("checkpoint.every=0", "checkpoint.seconds=0", "evaluate_every=1000")
    config = apply_settings(preset, (*sizes, *quiet))
    config = stretch(config, epochs) if epochs else config
    return apply_settings(config, settings)


class Planned(NamedTuple):
    """One run of a part."""

    name: str
    recipe: str
    batch: int
    settings: tuple[str, ...] = ()
    epochs: float | None = None
    seed: int = 0
    holdout: float = 0.0
    preset: str = "cifar10"

    @property
    def called(self) -> str:
        """The name of its line in the book."""
        return f"{self.name} seed {self.seed}"


Parts = Generator[Planned, dict[str, Any], None]
"""Runs one after the other; each answers with its line of the book, so that a search can follow what it found."""


def made_tiny(config: RunConfig) -> RunConfig:
    """A second of a run on a CPU: the same structure, a hundredth of the batch, a small network and one epoch."""
    shrunk = scale_workers(stretch(config, 1.0), count=1 / 128, local_batch=1 / 8, least=2)
    growth = dataclasses.replace(config.growth, measured=1)
    return dataclasses.replace(shrunk, model="small", precision="float32", growth=growth)


def trained(planned: Planned, folder: str, *, tiny: bool = False) -> dict[str, Any]:
    """Train once and return the line of the book; a run that fails or diverges is a result too."""
    seed, name = planned.seed, planned.called
    config = config_of(planned.recipe, planned.batch, planned.settings, planned.epochs, planned.preset)
    config = dataclasses.replace(made_tiny(config) if tiny else config, seed=seed)
    begin = time.perf_counter()
    row: dict[str, Any] = {"name": name, "recipe": config.recipe, "seed": seed, "epochs": config.epochs}
    row |= {"batch": planned.batch, "settings": planned.settings, "commit": commit(), "torch": torch.__version__}
    row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    try:
        with tempfile.TemporaryDirectory() as out:
            result = fit(config, data=images(folder, planned.holdout), out=out)
            run = read_run(Path(out))
        row |= {"accuracy": result.accuracy, "loss": result.loss, "steps": result.steps, "seconds": result.seconds}
        if config.evaluate_every < config.epochs:
            row["curve"] = [(each["epoch"], each["accuracy"]) for each in run.evaluations]
            row["losses"] = [each["loss"] for each in run.train][::10]
        seen = [(each["step"], each["noise_scale"]) for each in run.train if each.get("noise_scale") is not None]
        row["noise"] = [(step, round(value)) for step, value in seen[:: max(1, len(seen) // 20)]]
        row |= {key: result.facts[key] for key in ("noise_scale", "plan", "accuracy_views") if key in result.facts}
        row["images_per_s"] = result.facts["samples"] / result.seconds
        if not math.isfinite(result.loss):
            row["failure"] = "the loss is not finite"
    except StoppedError:
        raise SystemExit(f"Stopped in {name} by a signal; the same command goes on from here.") from None
    except BigstepError as error:
        row |= {"accuracy": None, "failure": str(error)}
    row["wall_s"] = time.perf_counter() - begin
    return row


class Book:
    """Results by name, kept line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.rows[row["name"]] = row

    def add(self, row: dict[str, Any], *, shared: bool) -> None:
        """Keep a line; `shared`: others used the GPU meanwhile, so that its times say nothing."""
        if shared:
            row["shared"] = True
        self.rows[row["name"]] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        views = f", {100 * row['accuracy_views']:.2f} % of views" if row.get("accuracy_views") is not None else ""
        shown = row.get("failure") or (
            f"{100 * row['accuracy']:.2f} %{views} in {row['steps']} steps, {row['seconds']:.2f} s"
        )
        print(f"{row['name']}: {shown} ({row['wall_s']:.1f} s)", flush=True)


@functools.cache
def commit() -> str:
    """The commit of the code that runs."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True)
    return asked.stdout.decode().strip() or "unknown"
