"""`bigstep data`: look at a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigstep.cli.options import Json, print_json, refuse_existing
from bigstep.data.names import Wanted

__all__ = ["data"]


def data(
    name: Annotated[str, typer.Argument(help="embedded, cifar10, shakespeare, …, a file or a folder.")] = "embedded",
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG) to this file.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every sample; exit 1 if one is corrupt.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a contact sheet that is there already.")] = False,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, of text.")] = Wanted.length,
    vocabulary: Annotated[str, typer.Option(help="How text becomes tokens: bytes, chars, …")] = Wanted.vocabulary,
    as_json: Json = False,
) -> None:
    """Look at a data set: counts, classes, sizes or tokens, a contact sheet, corrupt files, baselines."""
    from bigstep.data.command import data_command, is_sound

    refuse_existing(sheet, force=force)
    result = data_command(
        name, sheet=sheet, verify=verify, force=force, quiet=as_json, length=length, vocabulary=vocabulary
    )
    if as_json:
        print_json(result)
    if not is_sound(result):
        raise typer.Exit(1)
