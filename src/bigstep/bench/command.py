"""`bigstep bench`: a suite by name or from a file, run, compared and reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigstep.bench.own_suite import read_suite
from bigstep.bench.planned import Planned
from bigstep.bench.runner import Finished, run_all
from bigstep.bench.suites import SUITES, Options, Suite, planned_runs
from bigstep.bench.tuning import choose, trials_of
from bigstep.bench.watch import Watch
from bigstep.described import usable_cores
from bigstep.errors import ConfigError, nearest
from bigstep.records import json_text, read_run, write_atomically
from bigstep.report.gather import gather
from bigstep.report.html import write_html
from bigstep.report.study import Study, study_of
from bigstep.report.table import as_rows, standings_of, to_csv, to_markdown
from bigstep.report.terminal import print_summary

__all__ = ["bench_command", "planned_trials", "ranks_here"]


def bench_command(
    name: str,
    options: Options,
    *,
    out: Path,
    html: Path | None = None,
    tune: int = 0,
    retry: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> dict[str, Any]:
    """Run a suite and compare what it reached; return what `--json` prints.

    Args:
        name: A suite, or a YAML file that lists runs.
        options: What the suite leaves open.
        out: The folder that holds a folder for each suite.
        html: Where to write the page; by default report.html beside the runs.
        tune: Trials for each recipe before the suite; 0 takes the recipes as they are.
        retry: Run failed runs again.
        device: As `bigstep train --device` takes it.
        quiet: Print no summary.
    """
    file = Path(name)
    own = file.suffix in (".yaml", ".yml")
    if not own and name not in SUITES:
        raise ConfigError(f"Unknown suite {name!r}: {nearest(name, SUITES)} Or name a .yaml file that lists runs.")
    if own and options.recipes:
        raise ConfigError(f"--recipes goes with a suite by name, but {file} lists its runs itself; leave it out.")
    title = (file.stem if own else name) + ("-quick" if options.quick else "") + (f"-tuned{tune}" if tune else "")
    if tune:
        if own:
            raise ConfigError("--tune goes with a suite by name; in a file of your own, set what you have tuned.")
        options = dataclasses.replace(options, tuned=_tuned(SUITES[name], options, tune, title, out, device, retry))
    runs = read_suite(file, options) if own else planned_runs(SUITES[name], options)
    root = out / title
    finished = run_all(runs, title, root, Watch(title), device=device, retry=retry)
    study = study_of(gather([each.folder for each in finished]))
    page = html or root / "report.html"
    _write_results(study, root, page)
    if not quiet:
        print_summary(study)
        print(f"Report: {page}")
    return {
        "suite": title,
        "question": "" if own else SUITES[name].question,
        "summary": study.sentences(),
        "target": study.target,
        "failures": {each.run.name: each.failure for each in finished if each.failure},
        "ran": sum(not each.skipped for each in finished),
        "standings": standings_of(study),
        "runs": as_rows(study),
        "tuned": dict(options.tuned),
        "html": str(page),
    }


def ranks_here(device: str) -> int:
    """Return how many ranks a synchronous run of a suite gets: one a GPU, or two on a CPU with several cores."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return min(2, usable_cores())


def _tuned(
    suite: Suite, options: Options, tune: int, title: str, out: Path, device: str, retry: bool
) -> dict[str, tuple[str, ...]]:
    """Give every recipe the same number of trials, and return the settings that did best on held-out images."""
    trials = planned_trials(suite, options, tune)
    every = [trial for of_recipe in trials.values() for trial in of_recipe]
    root = out / f"{title}-trials"
    finished = run_all(every, f"{title}-trials", root, Watch(f"{title}-trials"), device=device, retry=retry)
    accuracies = _accuracies(finished)
    chosen = {recipe: choose(of_recipe, accuracies) for recipe, of_recipe in trials.items()}
    facts = {"trials": tune, "chosen": chosen, "held_out_accuracy": accuracies}
    write_atomically(root / "tuned.json", (json_text(facts, indent=1) + "\n").encode())
    return chosen


def planned_trials(suite: Suite, options: Options, tune: int) -> dict[str, list[Planned]]:
    """Return the trials of every recipe of a suite, including those that serve only as a baseline."""
    take_part = tuple(dict.fromkeys(run.recipe for run in planned_runs(suite, options)))
    terms = dataclasses.replace(options, seeds=1, recipes=take_part)
    once = planned_runs(dataclasses.replace(suite, build=SUITES["seeds"].build), terms)
    return {run.recipe: trials_of(run, tune) for run in once}


def _accuracies(finished: Sequence[Finished]) -> dict[str, float]:
    found = {}
    for each in finished:
        accuracy = None if each.failure else read_run(each.folder).result.get("accuracy")
        if accuracy is not None:
            found[each.run.name] = float(accuracy)
    return found


def _write_results(study: Study, root: Path, page: Path) -> None:
    """Leave the comparison beside the runs, as a page and as tables for papers and spreadsheets."""
    write_atomically(root / "results.csv", to_csv(study).encode())
    write_atomically(root / "results.md", to_markdown(study).encode())
    write_html(study, page)
