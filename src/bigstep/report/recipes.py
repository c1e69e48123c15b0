"""The recipes on a terminal: a table of all, or one with its evidence."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bigstep.report.figures import cut
from bigstep.report.words import duration, percent, plural

if TYPE_CHECKING:
    from bigstep.config import Published

__all__ = ["folded", "print_recipe", "print_recipes"]

_BATCH = re.compile(r"any$|[\d,.]+($|K| M| ->| to)")
"""What a paper reports as its batch, where it is one: asynchronous systems and islands report other things."""
_KEPT = re.compile(r"\||bigstep |torchrun |\w+: |- ")
"""Begins a line of its own: of a table, a command, a preset, a list."""


class Described(Protocol):
    """What `bigstep.recipes.describe` returns."""

    @property
    def name(self) -> str: ...  # noqa: D102 - said by the recipe
    @property
    def summary(self) -> str: ...  # noqa: D102
    @property
    def techniques(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def published(self) -> Published: ...  # noqa: D102
    @property
    def presets(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def docstring(self) -> str: ...  # noqa: D102


def print_recipes(recipes: Sequence[Described]) -> None:
    """Print each recipe: what it is, and under it what its paper reports; it fits any terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for recipe in recipes:
        published = recipe.published
        table.add_row(recipe.name, Text(recipe.summary))
        figures = (
            cut(f"batch {published.batch}" if _BATCH.match(published.batch) else published.batch, 46),
            None if published.seconds is None else duration(published.seconds),
            None if published.accuracy is None else f"{percent(published.accuracy)} top-1",
        )
        table.add_row("", Text(" · ".join(figure for figure in figures if figure), style="dim"))
    console = Console()
    console.print(table)
    console.print("\nBatch, time and top-1 are the papers' own, on their hardware and ImageNet.", style="dim")
    console.print("bigstep recipes NAME explains one; bigstep train NAME runs it on embedded data.", style="dim")


def print_recipe(recipe: Described, config: Mapping[str, Any]) -> None:
    """Print one recipe with its evidence and how to run it."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(Text(recipe.name, style="bold"), Text(f"· {recipe.summary}"))
    console.print(Text(f"techniques: {', '.join(recipe.techniques)}", style="cyan"))
    console.print(Text(f"presets:    {', '.join(recipe.presets)}", style="cyan"))
    workers = config["workers"]
    batch = workers["count"] * workers["local_batch"]
    share = f"{workers['count']} workers x {workers['local_batch']}"
    shown = f"{config['model']} on {config['data']['name']}, {share} = {batch:,}"
    console.print(Text(f"{config['preset']:<11} {shown}, {plural(config['epochs'], 'epoch')}", style="cyan"))
    console.print()
    console.print(Text(folded(recipe.docstring, console.width)), soft_wrap=True)  # its tables must not be broken


def folded(evidence: str, width: int) -> str:
    r"""Return a recipe's evidence with its sentences broken at `width`; tables and commands stay as they are.

    >>> print(folded("Batch\n    mini: one two three\n    four\n    paper: five", 20))
    Batch
        mini: one two
        three four
        paper: five
    """
    paragraphs: list[str] = []
    for line in evidence.splitlines():
        before = paragraphs[-1] if paragraphs else ""
        indent = line[: len(line) - len(line.lstrip())]
        goes_on = line.strip() and before.strip() and before.startswith(indent) and before[len(indent)] != " "
        if goes_on and indent and not _KEPT.match(line.strip()) and not before.strip().startswith("|"):
            paragraphs[-1] = f"{before} {line.strip()}"
        else:
            paragraphs.append(line)
    return "\n".join(_filled(each, width) for each in paragraphs)


def _filled(paragraph: str, width: int) -> str:
    indent = paragraph[: len(paragraph) - len(paragraph.lstrip())]
    if re.match(r"\||bigstep |torchrun ", paragraph.strip()):
        return paragraph
    return textwrap.fill(
        paragraph, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
