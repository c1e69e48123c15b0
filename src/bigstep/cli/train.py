"""`bigstep train`: from what was typed to a finished run with its report.

Resolving imports no torch, so that a mistake is told before anything is started.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bigstep.cli.imports import collector_off
from bigstep.config import RunConfig
from bigstep.config.text import apply_settings, config_from_mapping, config_from_yaml, finished_on_one, stretched
from bigstep.errors import BigstepError, ConfigError

if TYPE_CHECKING:
    from bigstep.engine.ranks import DeviceChoice
    from bigstep.engine.run import Audience

__all__ = ["Resolved", "TrainRequest", "named_config", "train_command"]

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A complete configuration; `folder` is None where rank 0 is to choose a new one."""

    config: RunConfig
    folder: Path | None


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What was typed."""

    recipe: str
    recipe_given: bool
    preset: str
    config: Path | None
    settings: tuple[str, ...]
    data: str | None
    epochs: float | None
    finish_on_one: float | None
    steps: int | None
    out: Path | None
    resume: bool
    device: str
    timeout: float
    profile: int | None
    tensorboard: bool
    report: bool
    as_json: bool

    def resolve(self) -> Resolved:
        """Build the configuration and find the folder, or say in one sentence why not."""
        if self.device not in ("auto", "cpu", "cuda", "shared"):
            raise ConfigError(f"--device is {self.device!r}, but it must be auto, cpu, cuda or shared.")
        folder = self._folder()
        config = self._base(folder)
        if self.epochs is not None:
            config = stretched(config, self.epochs)
        config = apply_settings(config, [*self._data_settings(config), *self.settings])
        if self.finish_on_one is not None:
            config = finished_on_one(config, self.finish_on_one)
        self._check_profile(config)
        return Resolved(config=config, folder=folder)

    def _check_profile(self, config: RunConfig) -> None:
        if self.profile is None:
            return
        if self.profile < 1:
            raise ConfigError(f"--profile is {self.profile}, but it must be a number of steps, for example 5.")
        if config.asynchronous.method != "none":
            raise ConfigError("--profile looks at synchronous steps, but this recipe is asynchronous; take another.")
        from bigstep.engine.profile.groups import WARM_UP_STEPS

        if self.steps is not None and self.steps <= WARM_UP_STEPS:
            raise ConfigError(
                f"--profile begins after {WARM_UP_STEPS} steps of warm-up, but --steps is {self.steps}; use --steps "
                f"{WARM_UP_STEPS + self.profile} or more."
            )

    def _folder(self) -> Path | None:
        if self.out is None:
            return _newest_unfinished(f"{self.recipe}-{self.preset}") if self.resume else None
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"--out {self.out} is a file; name a folder.")
        if not self.resume and self.out.is_dir() and any(self.out.iterdir()):
            raise ConfigError(f"--out {self.out} is not empty; add --resume to go on with its run, or name a new one.")
        return self.out

    def _base(self, folder: Path | None) -> RunConfig:
        named = self.config is not None or self.recipe_given
        if self.resume and folder is not None and not named and (folder / "run.json").exists():
            from bigstep.records import read_run

            return config_from_mapping(read_run(folder).config)
        return named_config(self.recipe, self.preset, self.config, recipe_given=self.recipe_given)

    def _data_settings(self, config: RunConfig) -> list[str]:
        if self.data is None:
            return []
        from bigstep.data.names import name_of_set

        name, path = name_of_set(self.data, config.data.name)
        return [f"data.name={json.dumps(name)}", f"data.path={json.dumps(path)}"]


def named_config(recipe: str, preset: str, file: Path | None, *, recipe_given: bool) -> RunConfig:
    """Return the configuration of a recipe, or that in a file if one is named; naming both is a mistake."""
    if file is None:
        from bigstep import recipes

        return recipes.load(recipe, preset)
    if recipe_given:
        raise ConfigError(f"Both the recipe {recipe!r} and --config {file} were given; give one.")
    try:
        return config_from_yaml(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {file} is not a text file.") from None


def train_command(request: TrainRequest, resolved: Resolved) -> dict[str, Any] | None:
    """Train on this rank; on rank 0 show progress, write the report and return the result."""
    config = resolved.config
    with collector_off():
        import torch._dynamo  # noqa: F401 - else torch's first optimizer imports it, outside of this block

        from bigstep.engine.observers.progress import Progress
        from bigstep.engine.ranks import joined_ranks
        from bigstep.engine.run import Order, run

        if config.asynchronous.method != "none":
            from bigstep.asynchronous.engine import run_asynchronously as run
    with joined_ranks(cast("DeviceChoice", request.device), request.timeout) as ranks:
        order = Order(
            config=config,
            folder=ranks.from_first(resolved.folder or new_folder(config)),
            resume=request.resume,
            max_steps=request.steps,
            published=_published(config.recipe),
            profile=request.profile or 0,
        )
        if not ranks.first:
            run(order, ranks, _Nobody())
            return None
        with Progress(config.recipe, config.epochs) as progress:
            audience: Audience = progress
            if request.tensorboard:
                from bigstep.engine.observers.tensorboard import TensorBoard

                audience = TensorBoard(progress, order.folder)
            result = run(order, ranks, audience)
    if request.report:
        _report(order.folder, quiet=request.as_json)
    if request.profile and (order.folder / "profile.json").exists():
        result = result | {"profile": _profile(order.folder, quiet=request.as_json)}
    return result


class _Nobody:
    """The audience of a rank other than 0."""

    def train(self, row: Mapping[str, Any]) -> None:
        """Rank 0 shows it."""

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Rank 0 shows it."""

    def note(self, text: str) -> None:
        """Rank 0 shows it."""


def _profile(folder: Path, *, quiet: bool) -> dict[str, Any]:
    """Show where the profiled steps went, and return the whole table."""
    from bigstep.engine.profile.text import profile_markdown

    profile: dict[str, Any] = json.loads((folder / "profile.json").read_bytes())
    if not quiet:
        print(profile_markdown(profile, most_rows=20))
    return profile


def _report(folder: Path, *, quiet: bool) -> None:
    """Write report.html and show the run beside the published result; a missing plotting package is no failure."""
    from bigstep.records import read_run
    from bigstep.report.html import write_html
    from bigstep.report.terminal import print_summary

    finished = read_run(folder)
    if not quiet:
        print_summary([finished])
    try:
        write_html([finished], folder / "report.html")
    except BigstepError as error:
        print(f"No report was written: {error}", file=sys.stderr)
        return
    if not quiet:
        print(f"Report: {folder / 'report.html'}")


def _published(recipe: str) -> dict[str, Any] | None:
    from bigstep import recipes

    return dataclasses.asdict(recipes.describe(recipe).published) if recipe in recipes.NAMES else None


def new_folder(config: RunConfig) -> Path:
    """Return a folder under runs/ that does not exist yet."""
    name, number = f"{config.recipe}-{config.preset}", 2
    candidate = RUNS / name
    while candidate.exists():
        candidate, number = RUNS / f"{name}-{number}", number + 1
    return candidate


def _newest_unfinished(name: str) -> Path | None:
    """Return the newest run of a recipe that has not finished, if there is one."""
    from bigstep.records import read_run

    candidates = sorted(
        (folder for folder in RUNS.glob(f"{name}*") if (folder / "run.json").exists()),
        key=lambda folder: (folder / "run.json").stat().st_mtime,
    )
    for folder in reversed(candidates):
        if not read_run(folder).result:
            return folder
    return None
