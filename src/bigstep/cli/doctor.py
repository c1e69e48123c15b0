"""`bigstep doctor`: its options, and the way from them to a report about a training script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bigstep.cli.options import Json, print_json, refuse_existing

__all__ = ["doctor"]

_OWN = ("--ranks", "--only", "--html", "--json", "--force")
"""Options of the doctor that few scripts have: typed after the script, they are probably misplaced."""


def doctor(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script as you start it, or -m MODULE.")
    ],
    ranks: Annotated[int, typer.Option(help="Ranks of the larger run; it is compared with a run on one.")] = 2,
    steps: Annotated[int, typer.Option(min=2, help="Updates after which each run is stopped.")] = 12,
    only: Annotated[str, typer.Option(help="Check only one family: samples, gradients, rate, time, …")] = "",
    device: Annotated[str, typer.Option(help="cpu, or auto: the GPUs if there is one for each rank.")] = "auto",
    timeout: Annotated[float, typer.Option(min=5, help="Seconds that each run may take.")] = 120.0,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
    as_json: Json = False,
) -> None:
    """Find out what is wrong with a training script on several devices, without changing it.

    The script runs for a few steps on 1 rank and on 2, in a scratch copy of this folder, while it is watched.

    \b
    bigstep doctor train.py --lr 0.1          # options of the doctor go before it
    bigstep doctor --ranks 4 -m mypackage.train
    bigstep doctor --only time train.py       # where the time goes, undisturbed
    """
    from bigstep.doctor import examine
    from bigstep.doctor.launch import Limits
    from bigstep.doctor.report import print_report, write_page

    refuse_existing(html, force=force)
    for word in command[1:]:
        if word.partition("=")[0] in _OWN:
            typer.echo(
                f"bigstep: {word} stands after the script, which gets it; the doctor's options go before it.", err=True
            )
    result = examine(
        command,
        ranks=ranks,
        steps=steps,
        only=only,
        device=device,
        limits=Limits(total_s=timeout),
        watch=lambda stage: print(f"doctor  {stage}", file=sys.stderr, flush=True),
    )
    if html is not None:
        write_page(result, html)
    if as_json:
        print_json(result.to_mapping())
    else:
        print_report(result)
    raise typer.Exit(0 if result.healthy else 1)
