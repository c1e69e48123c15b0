"""The door: every command of `bigstep`, as thin as it can be.

Nothing here imports torch before a command needs it, so that help, recipes and reports answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import bigstep
from bigstep.cli import plan as plan_commands
from bigstep.errors import BigstepError, ConfigError

__all__ = ["main"]

app = typer.Typer(
    help="Distributed SGD for PyTorch: train with many workers, prove that N give the result of one, compare the "
    "published systems side by side, and predict a run before a cluster is rented.",
    epilog="Start with `bigstep train`: it trains on data that ships with the package, in about a minute.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Config = Annotated[Path | None, typer.Option(help="A YAML file, as `bigstep recipes NAME --yaml` writes it.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change one field, as in --set lr.base=0.2; may be repeated."),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bigstep {bigstep.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value))


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A published system; `bigstep recipes` lists them.")] = "plain",
    preset: Annotated[
        str, typer.Option(help="mini (embedded data, a minute on two cores), paper (ImageNet), or another.")
    ] = "mini",
    config: Config = None,
    settings: Settings = None,
    data: Annotated[str | None, typer.Option(help="A data set by name (cifar10, …) or the folder of one.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training set.")] = None,
    finish_on_one: Annotated[
        float | None, typer.Option(metavar="EPOCHS", help="Run the last epochs in small batches on one worker.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps.")] = None,
    procs: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine; they share the workers.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in --out, or the newest one.")] = False,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="With --procs: go on with the ranks that are left when one is lost.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds after which ranks that wait for another name it and stop.")
    ] = 600,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or shared: several ranks on one GPU.")] = "auto",
    profile: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Profile so many steps: a trace and a table, kernel by kernel.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard events into the run folder too.")] = False,
    report: Annotated[bool, typer.Option(help="Show the result and write report.html at the end.")] = True,
    as_json: Json = False,
) -> None:
    """Train with a published system, on one process or many, and write a report.

    The run is defined by its logical workers, so it takes the same path on any number of ranks:

        bigstep train                             # a tuned baseline on embedded data
        bigstep train sony --procs 2              # Sony's recipe, two processes
        bigstep train lars --set workers.count=64 # a larger batch
        torchrun --nproc-per-node 8 -m bigstep train fair --preset paper --data /data/imagenet
        bigstep train hogwild --data FILE.svm     # a sparse linear model, in threads
    """
    from bigstep.cli.sparse import is_sparse_file, sparse_command
    from bigstep.cli.train import TrainRequest, new_folder, train_command
    from bigstep.engine import launch

    if data is not None and is_sparse_file(data):
        if profile is not None:
            raise ConfigError(f"--profile looks at the steps of a network, but {data} trains a sparse linear model.")
        facts = sparse_command(recipe, data, epochs, settings, quiet=as_json)
        if as_json:
            _print_json(facts)
        return
    request = TrainRequest(
        recipe=recipe,
        recipe_given=context.get_parameter_source("recipe").name != "DEFAULT",  # type: ignore[union-attr]
        preset=preset,
        config=config,
        settings=tuple(settings or ()),
        data=data,
        epochs=epochs,
        finish_on_one=finish_on_one,
        steps=steps,
        out=out,
        resume=resume,
        device=device,
        timeout=timeout,
        profile=profile,
        tensorboard=tensorboard,
        report=report,
        as_json=as_json,
    )
    resolved = request.resolve()  # a user's mistake is told here, before any process is started
    launch.die_with_launcher()
    if not launch.is_rank():
        if elastic:
            from bigstep.engine.elastic import launch_elastic

            raise typer.Exit(launch_elastic(procs, sys.argv[1:], resolved.folder or new_folder(resolved.config)))
        if procs > 1:
            raise typer.Exit(launch.launch(procs, sys.argv[1:]))
    result = train_command(request, resolved)
    if as_json and result is not None:
        _print_json(result)


@app.command()
def check(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A published system; `bigstep recipes` lists them.")] = "plain",
    preset: Annotated[str, typer.Option(help="mini, paper, or another; it is made small in any case.")] = "mini",
    config: Config = None,
    settings: Settings = None,
    ranks: Annotated[str, typer.Option("--ranks", "--procs", help="Sizes of the worlds to compare.")] = "1,2,4",
    as_json: Json = False,
) -> None:
    """Prove that a run on several ranks is the run of one, property by property, or say where they part.

    Small real worlds are started on this machine. A table shows each property with its figure, its bound and what to
    change where it fails; the exit status is 1 if any does.

        bigstep check                             # the baseline on 1, 2 and 4 ranks
        bigstep check sony --ranks 1,3            # Sony's recipe on 1 and 3
        bigstep check --config run.yaml --set model=my_package.models:network
    """
    from bigstep.cli.check import check_command

    given = context.get_parameter_source("recipe").name != "DEFAULT"  # type: ignore[union-attr]
    report = check_command(recipe, preset, config, settings or [], ranks, recipe_given=given)
    if as_json:
        _print_json(report.to_mapping())
    else:
        report.print()
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def bench(
    suite: Annotated[
        str, typer.Argument(help="seeds, batch, exchange, scaling, async, ablation, or a YAML file of your own.")
    ] = "seeds",
    quick: Annotated[bool, typer.Option("--quick", help="One seed and fewer epochs, for a first look.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds for each setting; 3 unless --quick.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training set, the same for all.")] = None,
    recipes: Annotated[str, typer.Option(help="Only these, as in plain,sony.")] = "",
    preset: Annotated[str, typer.Option(help="The preset of every recipe; cifar10 for one GPU.")] = "mini",
    settings: Settings = None,
    tune: Annotated[int, typer.Option(min=0, help="Trials for each recipe first, judged on held-out images.")] = 0,
    procs: Annotated[int | None, typer.Option(min=1, help="Ranks of a synchronous run; one a GPU, or two.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed before.")] = False,
    out: Annotated[Path, typer.Option(help="Where the runs go, in a folder for each suite.")] = Path("bench"),
    html: Annotated[Path | None, typer.Option(help="Write the page to this file instead of beside the runs.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Run systems side by side on the same samples, seeds and machine, and say what can be told apart.

    Finished runs are not run again, so an interrupted suite goes on where it was:

        bigstep bench --quick                     # every recipe once, a few minutes on two cores
        bigstep bench seeds                       # three seeds each: medians, spread, what is sure
        bigstep bench ablation --recipes sony     # what each of its techniques brings
        bigstep bench batch --preset cifar10      # on a GPU: larger network, images, batches
        bigstep bench mine.yaml                   # a list of {recipe, preset, set, seeds}
    """
    from bigstep.bench.command import bench_command, ranks_here
    from bigstep.bench.suites import Options

    options = Options(
        quick=quick,
        seeds=seeds,
        epochs=epochs,
        recipes=tuple(filter(None, (name.strip() for name in recipes.split(",")))),
        preset=preset,
        settings=tuple(settings or ()),
        procs=procs or ranks_here(device),
    )
    result = bench_command(suite, options, out=out, html=html, tune=tune, retry=retry, device=device, quiet=as_json)
    if as_json:
        _print_json(result)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, explained; without it all are listed.")] = None,
    preset: Annotated[str, typer.Option(help="Which preset --yaml and --json show.")] = "mini",
    yaml: Annotated[bool, typer.Option("--yaml", help="Print the whole configuration, ready to edit.")] = False,
    as_json: Json = False,
) -> None:
    """List the recipes, or explain one with its evidence.

    bigstep recipes sony                   # the paper, what is known, what was chosen
    bigstep recipes sony --yaml > run.yaml # edit it, then: bigstep train --config run.yaml
    """
    from bigstep import recipes as shelf
    from bigstep.config.text import config_to_mapping, config_to_yaml

    if name is None:
        descriptions = [shelf.describe(each) for each in shelf.NAMES]
        if as_json:
            _print_json({"recipes": [dataclasses.asdict(each) for each in descriptions]})
        else:
            from bigstep.report.shelf import print_shelf

            print_shelf(descriptions)
        return
    config = shelf.load(name, preset)
    if yaml:
        typer.echo(config_to_yaml(config), nl=False)
    elif as_json:
        _print_json({**dataclasses.asdict(shelf.describe(name)), "config": config_to_mapping(config)})
    else:
        from bigstep.report.shelf import print_recipe

        print_recipe(shelf.describe(name), config_to_mapping(config))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a row a run to this file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table instead of plots.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an output file that is there already.")] = False,
    as_json: Json = False,
) -> None:
    """Show what runs reached, side by side: in the terminal, as a page, or as a table."""
    from bigstep.report.command import report_command

    result = report_command(runs, html=html, csv=csv, markdown=markdown, force=force, quiet=as_json)
    if as_json:
        _print_json(result)


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="embedded, cifar10, …, or a folder.")] = "embedded",
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG) to this file.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Decode every file and name the corrupt ones.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a contact sheet that is there already.")] = False,
    as_json: Json = False,
) -> None:
    """Look at a data set: counts, classes, sizes, a contact sheet, corrupt files."""
    from bigstep.data.command import data_command

    result = data_command(name, sheet=sheet, verify=verify, force=force, quiet=as_json)
    if as_json:
        _print_json(result)


app.command()(plan_commands.plan)
app.command()(plan_commands.probe)


def main() -> None:
    """Run the program; every expected failure is one sentence on stderr."""
    sys.path.append(os.getcwd())  # so that package.module:function finds the user's own; last, so that it hides nothing
    try:
        app(standalone_mode=True)
    except BigstepError as error:
        if error.exit_status == 1 or os.environ.get("RANK", "0") == "0":  # all ranks make the same mistake; one tells
            _complain(str(error))
        sys.exit(error.exit_status)
    except BrokenPipeError:  # the reader of a pipe left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        _complain("interrupted; a run that was under way goes on with --resume.")
        sys.exit(130)


def _complain(sentence: str) -> None:
    print(f"bigstep: {sentence}", file=sys.stderr)
