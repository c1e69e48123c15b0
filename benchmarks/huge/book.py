"""Runs in one process, each a line of JSON in a book; a line that is there is not run again."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bigstep import recipes
from bigstep.config import RunConfig
from bigstep.config.edit import scale_workers, stretch
from bigstep.config.text import apply_settings
from bigstep.engine.interruption import StoppedError
from bigstep.errors import BigstepError
from bigstep.records import read_run
from bigstep.train import fit


def config_of(
    recipe: str, batch: int, settings: Sequence[str] = (), epochs: float | None = None, preset: str = "mini"
) -> RunConfig:
    """The preset with `batch` as its largest; workers are added, and rates follow by the recipe's own rule."""
    config = recipes.load(recipe, preset)
    stages = [config.workers, *config.stages]
    largest = max(stage.count * stage.local_batch for stage in stages)
    config = scale_workers(config, count=batch / largest)
    quiet = ("checkpoint.every=0", "checkpoint.seconds=0", "evaluate_every=1000")
    config = apply_settings(config, quiet)
    return apply_settings(stretch(config, epochs) if epochs else config, settings)


class Book:
    """Results by name, kept line by line; `seconds` is how long new runs may be started."""

    def __init__(self, path: Path, seconds: float = float("inf")) -> None:
        self.path, self._until = path, time.monotonic() + seconds
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.rows = {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}

    def run(self, name: str, config: RunConfig, seed: int = 0, device: str = "auto") -> dict[str, Any]:
        """Train once, or return what that gave before; a run that fails is a result too, with accuracy 0."""
        name = f"{name} seed {seed}"
        if name in self.rows:
            return self.rows[name]
        if time.monotonic() > self._until:
            raise SystemExit(f"Stopped before {name}: the time is up; the same command goes on from here.")
        config = dataclasses.replace(config, seed=seed)
        row: dict[str, Any] = {"name": name, "recipe": config.recipe, "seed": seed, "epochs": config.epochs}
        begin = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as out:
                result = fit(config, out=out, device=device)
                trained = read_run(Path(out)).train
            kept = ("accuracy", "bits_per_byte", "loss", "eval_loss", "steps", "samples", "noise_scale")
            row |= {key: result.facts[key] for key in kept if key in result.facts}
            changes = [r for i, r in enumerate(trained) if not i or r["batch"] > max(s["batch"] for s in trained[:i])]
            row["batches"] = [[round(each["epoch"], 2), each["batch"]] for each in changes]
        except StoppedError:
            raise SystemExit(f"Stopped in {name} by a signal; the same command goes on from here.") from None
        except BigstepError as error:
            row |= {"accuracy": 0.0, "failure": str(error)}
        row |= {"wall_s": round(time.perf_counter() - begin, 1), "commit": commit(), "torch": torch.__version__}
        row |= {"rate": config.lr.base, "batch": config.batch, "optimizer": config.optimizer.name}
        self.rows[name] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: {shown([row])} in {row.get('steps')} steps ({row['wall_s']} s)", flush=True)
        return row

    def of(self, name: str) -> list[dict[str, Any]]:
        """The runs of a name, one a seed."""
        return [row for key, row in self.rows.items() if key.rsplit(" seed ", 1)[0] == name]


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Mean, half the range and number of seeds, in percent of images or in bits a byte."""
    if not rows:
        return ""
    key = "bits_per_byte" if rows[0].get("bits_per_byte") is not None else "accuracy"
    values = [row[key] * (100 if key == "accuracy" else 1) for row in rows]
    digits = 1 if key == "accuracy" else 3
    spread = f" ± {(max(values) - min(values)) / 2:.{digits}f} (n={len(values)})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def commit() -> str:
    """The commit of the code that ran."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True)
    return asked.stdout.decode().strip() or "unknown"
