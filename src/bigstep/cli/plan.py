"""`bigstep plan`: predict a run before the cluster is rented."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bigstep.cli.options import Json, print_json, refuse_existing
from bigstep.errors import require

__all__ = ["plan"]


def plan(
    model: Annotated[str, typer.Option(help="A built-in model (resnet50, …) or a workload file.")] = "resnet50",
    cluster: Annotated[str, typer.Option(help="A built-in cluster (abci, mn1, dgx_h100, …) or a file.")] = "abci",
    gpus: Annotated[int, typer.Option(help="How many devices; 0 takes the whole cluster.")] = 0,
    batch: Annotated[int, typer.Option(help="Global batch; 0 lets the search choose.")] = 0,
    target: Annotated[float, typer.Option(help="Accuracy to reach, in percent.")] = 0.0,
    budget: Annotated[float, typer.Option(help="Minutes allowed: find the fewest devices, at most --gpus.")] = 0.0,
    collective: Annotated[str, typer.Option(help="Consider only this collective.")] = "",
    codec: Annotated[str, typer.Option(help="Consider only this codec.")] = "",
    sweep: Annotated[str, typer.Option(metavar="gpus=1..4096", help="Predict a curve over device counts.")] = "",
    runs: Annotated[
        list[Path] | None, typer.Option(help="Your own runs, or a suite's folder, to fit epochs against batch.")
    ] = None,
    price: Annotated[float, typer.Option(help="Price of a device hour: adds costs and the cheapest way.")] = 0.0,
    lifetime: Annotated[float, typer.Option(help="Hours until a device is lost, on average (spot machines).")] = 0.0,
    validate: Annotated[bool, typer.Option("--validate", help="Show published results beside predictions.")] = False,
    validate_local: Annotated[
        bool,
        typer.Option(
            "--validate-local", help="Measure real runs on throttled links and compare (needs root, takes minutes)."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Where --validate-local writes what it measured.")] = Path("local.json"),
    html: Annotated[Path | None, typer.Option(help="Write a page with sliders to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
    as_json: Json = False,
) -> None:
    """Predict a run before you rent the cluster: time, method, and whether compression pays off.

    \b
    bigstep plan --gpus 2048                                  # ResNet-50 on ABCI
    bigstep plan --cluster dgx_h100 --gpus 512 --target 75.9 --html plan.html
    bigstep plan --model gpt-124m --cluster dgx_h200 --gpus 64 --price 2.5
    bigstep plan --cluster my.yaml --model my_model.yaml      # from bigstep probe
    """
    require(
        html is None or not (validate or validate_local),
        "--html draws a prediction, but --validate compares with what was measured; leave one of them out.",
    )
    refuse_existing(html, out if validate_local else None, force=force)
    if validate_local:
        from bigstep.lab.validate import validate_local as measure_and_compare

        result: dict[str, Any] = measure_and_compare(out, tell=lambda line: typer.echo(line, err=True))
    else:
        from bigstep.plan import cli_result

        result = cli_result(
            model=model,
            cluster=cluster,
            gpus=gpus,
            batch=batch,
            target=target,
            budget_minutes=budget,
            collective=collective,
            codec=codec,
            sweep=sweep,
            law_runs=runs or (),
            price=price,
            lifetime_hours=lifetime,
            validate=validate,
        )
    if html is not None:
        from bigstep.plan.page import write_page

        write_page(result, html, model=model, cluster=cluster)
    if as_json:
        print_json(result)
        return
    from bigstep.plan import render

    render(result)
    if html is not None:
        typer.echo(f"Written: {html}")
