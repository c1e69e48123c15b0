"""`bigstep check`: prove that a run on several ranks equals the run on one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from bigstep.cli.imports import collector_off
from bigstep.cli.options import ConfigFile, Json, RecipeName, Settings, Trust, print_json
from bigstep.errors import ConfigError

__all__ = ["check"]

Watch = Callable[[str, int, int], None]


def check(
    recipe: RecipeName = None,
    ranks: Annotated[str, typer.Option("--ranks", "--procs", help="Numbers of ranks to compare.")] = "1,2,3,4",
    preset: Annotated[str, typer.Option(help="mini, paper, or another; it is scaled down in any case.")] = "mini",
    config: ConfigFile = None,
    settings: Settings = None,
    trust: Trust = False,
    exact: Annotated[bool, typer.Option("--exact", help="Make the run exact, and allow no difference at all.")] = False,
    as_json: Json = False,
) -> None:
    """Prove that a run on several ranks equals the run on one, property by property, or say where they differ.

    Small worlds of real processes are started on this machine. A table shows each property with its figure, its bound
    and, if it fails, what to change; the exit status is 1 if any fails.

    \b
    bigstep check                             # the baseline on 1 to 4 ranks
    bigstep check sony --ranks 1,3            # Sony's recipe on 1 and 3
    bigstep check --config run.yaml --set model=my_package.models:network
    """
    from bigstep.cli.resolve import for_model, named_config, require_trusted
    from bigstep.config.edit import make_exact
    from bigstep.config.text import apply_settings

    sizes = _sizes(ranks)
    named = named_config(recipe, preset, config, trusted=trust)
    asked = apply_settings(for_model(named, None, settings), settings or [])
    require_trusted(asked, config, settings or [], trusted=trust)
    asked = make_exact(asked) if exact else asked
    with collector_off():
        from bigstep.check import check as prove

    with _telling(asked.recipe) as watch:
        report = prove(asked, ranks=sizes, watch=watch)
    if as_json:
        print_json(report.to_mapping())
    else:
        report.print()
    raise typer.Exit(0 if report.passed else 1)


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks is {text!r:.60}, but it must be numbers like 1,2,4.") from None


@contextlib.contextmanager
def _telling(title: str) -> Iterator[Watch]:
    """Yield a function that shows the property being checked: in place on a terminal, elsewhere a line for each."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda name, number, count: print(f"{title}  {number}/{count}  {name}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, highlight=False).status(Text(title, style="bold")) as status:
        yield lambda name, number, count: status.update(
            Text.assemble((title, "bold"), f"  {number}/{count}  {name}", no_wrap=True, overflow="crop")
        )
