"""`bigstep data`: look at a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigstep.cli.options import Json, print_json, refuse_existing

__all__ = ["data"]


def data(
    name: Annotated[str, typer.Argument(help="embedded, cifar10, …, or a folder.")] = "embedded",
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG) to this file.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Decode every file and name the corrupt ones.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a contact sheet that is there already.")] = False,
    as_json: Json = False,
) -> None:
    """Look at a data set: counts, classes, sizes, a contact sheet, corrupt files."""
    from bigstep.data.command import data_command

    refuse_existing(sheet, force=force)
    result = data_command(name, sheet=sheet, verify=verify, force=force, quiet=as_json)
    if as_json:
        print_json(result)
