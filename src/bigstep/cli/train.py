"""`bigstep train`: its options, and the way from them to ranks that train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bigstep.cli.options import ConfigFile, Json, RecipeName, Settings, Trust, print_json
from bigstep.cli.streams import show_for_now
from bigstep.errors import ConfigError, require

__all__ = ["Train", "train"]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train with a published system, on one process or many, and write a report.

    The run is defined by its logical workers, so it takes the same path on any number of ranks:

    \b
    bigstep train                             # a tuned baseline on embedded data
    bigstep train sony --procs 2              # Sony's recipe, two processes
    bigstep train lars --batch 2048 --seed 1  # a larger batch
    bigstep train --config runs/sony-mini     # an earlier run again
    bigstep train hogwild --data FILE.svm     # a sparse linear model, in threads
    torchrun --nproc-per-node 8 -m bigstep train fair --preset paper --data DIR
    """

    recipe: RecipeName = None
    lr: Annotated[float | None, typer.Option(help="Base learning rate (lr.base).")] = None
    batch: Annotated[int | None, typer.Option(help="Global batch: workers x local batch.")] = None
    workers: Annotated[int | None, typer.Option(help="Logical workers (workers.count).")] = None
    epochs: Annotated[float | None, typer.Option(help="Passes over the training set; schedules stretch to fit.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of weights, sample order and augmentation.")] = None
    model: Annotated[str | None, typer.Option(help="small, resnet50, …, or package.module:function.")] = None
    data: Annotated[str | None, typer.Option(help="A data set by name (cifar10, …), or its file or folder.")] = None
    procs: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine; they share the workers.")] = 1
    name: Annotated[str | None, typer.Option(help="Name of the run in reports and of its folder in runs/.")] = None
    tag: Annotated[list[str] | None, typer.Option(metavar="WORD", help="A tag for the run; may be repeated.")] = None
    preset: Annotated[str, typer.Option(help="mini (embedded data, a minute), paper (ImageNet), or another.")] = "mini"
    config: ConfigFile = None
    settings: Settings = None
    trust: Trust = False
    out: Annotated[Path | None, typer.Option(help="The run folder; by default a new one under runs/.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, or the unfinished one.")] = False
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps.")] = None
    finish_on_one: Annotated[
        float | None, typer.Option(metavar="EPOCHS", help="Run the last epochs in small batches on one worker.")
    ] = None
    exact: Annotated[bool, typer.Option("--exact", help="Compute the same bits on any number of ranks.")] = False
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or shared: several ranks on one GPU.")] = "auto"
    elastic: Annotated[
        bool, typer.Option("--elastic", help="With --procs: continue with the remaining ranks when one is lost.")
    ] = False
    timeout: Annotated[
        float, typer.Option(help="Seconds that ranks wait for a missing one before they name it and stop.")
    ] = 600
    profile: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Profile this many steps: a trace, and a table of kernels."),
    ] = None
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Downpour: where `bigstep join` on other machines finds it.")
    ] = None
    replicas_elsewhere: Annotated[
        int, typer.Option(min=0, metavar="N", help="Replicas that must join from other machines first.")
    ] = 0
    shards_elsewhere: Annotated[
        int, typer.Option(min=0, metavar="N", help="Shards that must join from other machines first.")
    ] = 0
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")] = False
    wandb: Annotated[bool, typer.Option("--wandb", help="Log to Weights & Biases too.")] = False
    mlflow: Annotated[bool, typer.Option("--mlflow", help="Log to MLflow too.")] = False
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Show the result and write report.html at the end.")
    ] = True
    as_json: Json = False


def train(options: Train) -> None:
    """Resolve the options, once; then train here, or start ranks that do."""
    from bigstep.cli.resolve import finished_result, job_of, require_capacity
    from bigstep.cli.sparse import is_sparse_file, train_sparse_file
    from bigstep.engine import launch
    from bigstep.engine.launchers import adopt_launcher, copies_alone
    from bigstep.engine.scratch import sweep

    place = adopt_launcher()
    if is_sparse_file(options.data, options.recipe):
        require(
            place is None or place.size == 1,
            f"{options.data!s:.200} trains a sparse linear model in threads of one process: leave out torchrun, srun "
            "and mpirun, and write --set n_threads=2.",
        )
        train_sparse_file(options)
        return
    job = job_of(options, launched=place is not None)
    if job.resume and (result := finished_result(job)) is not None:
        sweep()  # a run that starts does this itself
        if place is not None and place.rank:
            return  # the first rank reports it
        typer.echo(f"The run in {job.folder} is already finished; nothing was changed.", err=True)
        if options.as_json:
            print_json(result)
        return
    launch.die_with_launcher()
    show_for_now("starting …")
    if place is None:
        require_capacity(options.procs, job)
    if place is None and (options.procs > 1 or options.elastic):
        from bigstep.engine.elastic import launch_elastic

        raise typer.Exit((launch_elastic if options.elastic else launch.launch)(options.procs, job))
    if place is not None and options.procs > 1:
        raise ConfigError(f"--procs is {options.procs}, but {place.size} ranks were started already; leave it out.")
    from bigstep.cli.rank import train_as_rank

    if place is None and (copies := copies_alone()) > 1:
        typer.echo(
            f"bigstep: {copies} copies of this command run side by side, each alone; if they should train together, "
            "start them with torchrun, srun or mpirun, or once with --procs.",
            err=True,
        )
    train_as_rank(job)
