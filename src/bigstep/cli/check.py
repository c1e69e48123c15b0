"""`bigstep check`: from what was typed to a report, with a live line while the worlds work."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bigstep.cli.imports import collector_off
from bigstep.cli.train import named_config
from bigstep.config.text import apply_settings
from bigstep.errors import ConfigError

if TYPE_CHECKING:
    from bigstep.check import Report

__all__ = ["check_command"]

Watch = Callable[[str, int, int], None]


def check_command(
    recipe: str, preset: str, file: Path | None, settings: Sequence[str], ranks: str, *, recipe_given: bool
) -> Report:
    """Check what was asked for, telling on standard error which property is being looked at."""
    try:
        sizes = [int(size) for size in ranks.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks is {ranks!r}, but it must be numbers like 1,2,4.") from None
    config = apply_settings(named_config(recipe, preset, file, recipe_given=recipe_given), settings)
    with collector_off():
        from bigstep.check import check

    with _telling(config.recipe) as watch:
        return check(config, ranks=sizes, watch=watch)


@contextlib.contextmanager
def _telling(title: str) -> Iterator[Watch]:
    """Yield a function that shows the present property: one line in place on a terminal, a line each elsewhere."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda name, number, count: print(f"{title}  {number}/{count}  {name}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, highlight=False).status(Text(title, style="bold")) as status:
        yield lambda name, number, count: status.update(
            Text.assemble((title, "bold"), f"  {number}/{count}  {name}", no_wrap=True, overflow="crop")
        )
