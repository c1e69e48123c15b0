"""`bigstep bench`: systems side by side on the same samples, seeds and machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bigstep.cli.options import Json, Settings, Trust, print_json, refuse_existing, require_device
from bigstep.errors import require

__all__ = ["Bench", "bench"]

_SUITE = "seeds, batch, exchange, scaling, async, islands, sequence, ablation, or a YAML file of your own."


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Run systems side by side on the same samples, seeds and machine, and say which differences are real.

    Finished runs are not run again, so an interrupted suite continues where it stopped:

    \b
    bigstep bench --quick                     # every recipe once, a few minutes
    bigstep bench seeds                       # three seeds each: what is luck?
    bigstep bench ablation --recipes sony     # what each technique contributes
    bigstep bench batch --preset cifar10      # larger, on a GPU
    bigstep bench mine.yaml                   # a list of runs of your own
    """

    suite: Annotated[str, typer.Argument(help=_SUITE)] = "seeds"
    quick: Annotated[bool, typer.Option("--quick", help="One seed and fewer epochs, for a first look.")] = False
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds for each setting; 3, or 1 with --quick.")] = None
    epochs: Annotated[float | None, typer.Option(help="Passes over the training set, the same for all.")] = None
    recipes: Annotated[str, typer.Option(help="Only these recipes, as in plain,sony.")] = ""
    preset: Annotated[str, typer.Option(help="The preset of every recipe; cifar10 for one GPU.")] = "mini"
    settings: Settings = None
    trust: Trust = False
    tune: Annotated[
        int, typer.Option(min=0, help="Trials to tune each recipe with first, judged on held-out images.")
    ] = 0
    procs: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a synchronous run; one per GPU, or 2 on a CPU.")
    ] = None
    retry: Annotated[bool, typer.Option("--retry", help="Rerun what failed before.")] = False
    out: Annotated[Path, typer.Option(help="Folder for the runs; each suite gets its own in it.")] = Path("bench")
    html: Annotated[Path | None, typer.Option(help="Write the page to this file instead of beside the runs.")] = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or shared: several ranks on one GPU.")] = "auto"
    as_json: Json = False


def bench(options: Bench) -> None:
    """Run the suite, or what is left of it."""
    from bigstep.bench.command import bench_command, ranks_here
    from bigstep.bench.suites import Options

    refuse_existing(options.html, force=True)
    require_device(options.device, "auto", "cpu", "cuda", "shared")
    epochs = options.epochs
    require(epochs is None or 0 < epochs < math.inf, f"--epochs is {epochs}, but it must be greater than 0.")
    recipes = tuple(filter(None, (name.strip() for name in options.recipes.split(","))))
    require(
        bool(recipes) or not options.recipes,
        f"--recipes is {options.recipes!r:.60}, which names no recipe; name some, as in plain,sony.",
    )
    terms = Options(
        quick=options.quick,
        seeds=options.seeds,
        epochs=epochs,
        recipes=recipes,
        preset=options.preset,
        settings=tuple(options.settings or ()),
        procs=options.procs or ranks_here(options.device),
        trust=options.trust,
    )
    result = bench_command(
        options.suite,
        terms,
        out=options.out,
        html=options.html,
        tune=options.tune,
        retry=options.retry,
        device=options.device,
        quiet=options.as_json,
    )
    if options.as_json:
        print_json(result)
