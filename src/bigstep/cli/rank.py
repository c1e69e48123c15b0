"""One rank of `bigstep train`: it trains; the first one shows progress and the result, and writes the report."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bigstep.cli.imports import collector_off, leave_out_compiler
from bigstep.cli.options import print_json
from bigstep.config.edit import flatten
from bigstep.config.text import config_to_mapping
from bigstep.report.outcome import unit_of

if TYPE_CHECKING:
    from bigstep.engine.job import Job
    from bigstep.engine.observers.base import Observer
    from bigstep.engine.ranks import DeviceChoice

__all__ = ["show_report", "train_as_rank"]


def train_as_rank(job: Job) -> None:
    """Train as one rank of a job; the first rank shows the result."""
    with collector_off():
        if not job.config.compile and "torch" not in sys.modules:
            leave_out_compiler()

        from bigstep.engine.observers.progress import Progress
        from bigstep.engine.ranks import joined_ranks
        from bigstep.engine.run import Order, run

        if job.config.asynchronous.method != "none":
            from bigstep.asynchronous.engine import run_asynchronously

            run = functools.partial(run_asynchronously, listen=job.listen, elsewhere=job.elsewhere)
    with joined_ranks(cast("DeviceChoice", job.device), job.timeout_s) as ranks:
        order = Order(
            config=ranks.from_first(job.config),
            folder=ranks.from_first(job.folder),  # under torchrun each rank has chosen its own
            resume=job.resume,
            max_steps=job.steps,
            facts=job.facts,
            profile=job.profile,
            said=job.said,
            survivors=job.survivors,
        )
        if not ranks.first:
            run(order, ranks)
            return
        unit = unit_of(order.config.data.name)
        with Progress(order.config.recipe, order.config.epochs, steps=job.steps, unit=unit) as progress:
            result = run(order, ranks, _observers(job, progress))
    if job.report:
        show_report(order.folder, quiet=job.as_json)
    if job.profile and (order.folder / "profile.json").exists():
        result = result | {"profile": _profile(order.folder, quiet=job.as_json)}
    if job.as_json:
        print_json(result)
    elif "model" in result:
        print(f"Weights: {result['model']}")


def _observers(job: Job, progress: Observer) -> list[Observer]:
    """Return the observers of the run, besides its records."""
    if not job.trackers:
        return [progress]
    from bigstep.engine.observers.trackers import TRACKERS

    config = dict(flatten(config_to_mapping(job.config)))
    return [progress, *(TRACKERS[name](job.folder, config, job.facts) for name in job.trackers)]


def _profile(folder: Path, *, quiet: bool) -> dict[str, Any]:
    """Show where the time of the profiled steps went, and return the whole table."""
    from bigstep.engine.profile.text import profile_markdown

    profile: dict[str, Any] = json.loads((folder / "profile.json").read_bytes())
    if not quiet:
        print(profile_markdown(profile, most_rows=20))
    return profile


def show_report(folder: Path, *, quiet: bool) -> None:
    """Write report.html and show the run beside the published result."""
    from bigstep.records import read_run
    from bigstep.report.html import write_html
    from bigstep.report.terminal import print_summary

    finished = read_run(folder)
    write_html([finished], folder / "report.html")
    if not quiet:
        print_summary([finished])
        print(f"Report: {folder / 'report.html'}")
