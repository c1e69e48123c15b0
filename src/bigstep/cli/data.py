"""`bigstep data`: inspect a data set, or pack it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bigstep.cli.options import Json, print_json, refuse_existing
from bigstep.cli.streams import folded_for, show_for_now
from bigstep.data.names import Packing, Wanted
from bigstep.errors import ConfigError
from bigstep.tables.datasets import DATASETS

__all__ = ["data"]

_WORDS = "A set (embedded, cifar10, shakespeare, …), a file or a folder; by default embedded. Or `pack FOLDER OUT`."


def data(
    words: Annotated[list[str] | None, typer.Argument(metavar="NAME", help=_WORDS)] = None,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG) to this file.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every sample; exit 1 if one is corrupt.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing contact sheet.")] = False,
    length: Annotated[int, typer.Option(min=1, help="Text: tokens per sequence.")] = Wanted.length,
    vocabulary: Annotated[str, typer.Option(help="Text: what becomes a token: bytes, chars, …")] = Wanted.vocabulary,
    side: Annotated[int, typer.Option(min=0, help="pack: shrink images to this short side.")] = Packing.side,
    raw: Annotated[bool, typer.Option("--raw", help="pack: store pixels, which need no decoding.")] = Packing.raw,
    as_json: Json = False,
) -> None:
    """Inspect a data set: counts, classes, sizes or tokens, corrupt files, baselines. Or pack it into a few files.

    \b
    bigstep data FOLDER --verify             # name every damaged image
    bigstep data pack FOLDER OUT --side 400  # a few tar files of smaller images
    bigstep data pack TEXT.txt OUT.tokens    # tokens; may be larger than memory
    """
    from bigstep.data.command import data_command, is_sound, pack_command

    given = words or ["embedded"]
    if given[0] == "pack":
        if len(given) != 3:
            raise ConfigError(
                f"`bigstep data pack FOLDER OUT` takes 2 paths, what to pack and where to write (got {len(given) - 1})."
            )
        packing = Packing(out=Path(given[2]), side=side, raw=raw, say=_say, on_the_way=show_for_now)
        try:
            packed = pack_command(given[1], packing, vocabulary=vocabulary)
        except KeyboardInterrupt:  # typer would say nothing
            typer.echo("bigstep: interrupted; run the same command to continue.", err=True)
            raise typer.Exit(130) from None
        if as_json:
            print_json(packed)
        else:
            size = "" if str(packed["path"]).endswith(".tokens") else " --set data.image_size=PIXELS"
            named = str(packed["path"])
            where = f"./{named}" if named in DATASETS else named  # the bare name would mean the known set
            told = f"{named}: {packed['bytes']:,} bytes. Train on it with --data {where}{size}."
            typer.echo(folded_for(sys.stdout, told))
        return
    if len(given) > 1:
        raise ConfigError(f"bigstep data inspects one data set at a time, but {len(given)} were named; name one.")
    refuse_existing(sheet, force=force)
    result = data_command(
        given[0], sheet=sheet, verify=verify, force=force, quiet=as_json, length=length, vocabulary=vocabulary
    )
    if as_json:
        print_json(result)
    if not is_sound(result):
        raise typer.Exit(1)


def _say(line: str) -> None:
    show_for_now("")
    typer.echo(line, err=True)
