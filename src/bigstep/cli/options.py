"""What the commands share: options that several of them take, and commands made from a dataclass of options."""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from bigstep.errors import ConfigError, require
from bigstep.records import json_text

__all__ = [
    "ConfigFile", "Json", "Settings", "Trust", "command_of", "print_json", "refuse_existing", "require_device",
]  # fmt: skip

Options = TypeVar("Options")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")]


def field_names(incomplete: str) -> list[str]:
    """Complete a field of the configuration, for --set."""
    from bigstep.config.edit import flatten
    from bigstep.config.text import config_to_mapping
    from bigstep.recipes import load

    fields = (field for field, _ in flatten(config_to_mapping(load("plain"))))
    return [f"{field}=" for field in fields if field.startswith(incomplete)]


def recipe_names(incomplete: str) -> list[str]:
    """Complete the name of a recipe."""
    from bigstep.recipes import NAMES

    return [name for name in NAMES if name.startswith(incomplete)]


RecipeName = Annotated[
    str | None,
    typer.Argument(
        help="A published system; `bigstep recipes` lists them. By default plain.", autocompletion=recipe_names
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(help="A YAML file like those of `bigstep recipes NAME --yaml`, or the folder of a run."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change one field, as in --set lr.base=0.2; may be repeated.",
        autocompletion=field_names,
    ),
]


Trust = Annotated[bool, typer.Option("--trust", help="Allow a file to name code to run (package.module:function).")]


def command_of(options: type[Options], run: Callable[[Options], None]) -> Callable[..., None]:
    """Return a function that typer reads as a command: its parameters are the fields of a dataclass.

    So an option is written once: the field has its name, type, help and default, and `run` gets all options at once.
    """

    def command(**given: Any) -> None:
        run(options(**given))

    hints = typing.get_type_hints(options, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what inspect.signature looks for
        [
            inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name])
            for field in dataclasses.fields(options)  # type: ignore[arg-type]  # a dataclass, which the type cannot say
        ]
    )
    command.__annotations__ = hints
    command.__doc__ = options.__doc__
    return command


def print_json(value: Any) -> None:
    """Print one JSON object and nothing else."""
    typer.echo(json_text(value))


def require_device(given: str, *allowed: str) -> None:
    """Refuse a word for --device that the command does not know."""
    listed = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
    require(given in allowed, f"--device is {given!r:.60}, but it must be {listed}.")


def refuse_existing(*files: Path | None, force: bool) -> None:
    """Refuse a file that exists, unless --force was given, and one whose folder is missing or not writable."""
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise ConfigError(f"{file} is a folder; name a file.")
        if file.exists() and not force:
            raise ConfigError(f"{file} already exists; add --force to replace it, or name another file.")
        if not file.parent.is_dir():
            raise ConfigError(f"{file} cannot be written: there is no folder {file.parent}; make it first.")
        if not os.access(file.parent, os.W_OK):  # refused now, not after minutes of work
            raise ConfigError(
                f"{file} cannot be written: you may not write to {file.parent.absolute()}; name another file."
            )
