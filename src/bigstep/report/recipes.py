"""The recipes on a terminal: a table of all, or one with its evidence."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bigstep.report.words import duration, percent, plural

if TYPE_CHECKING:
    from bigstep.config import Published

__all__ = ["folded", "print_recipe", "print_recipes"]

_BATCH = re.compile(r"any$|[\d,.]+($|K| M| ->| to)")
"""Matches a published batch that is a size; asynchronous systems and islands have other text there."""
_KEPT = re.compile(r"\||bigstep |torchrun |- ")
"""Starts a line that is not joined to the one before: of a table, a command, a list."""
_WHOLE = re.compile(r"\||bigstep |torchrun ")
"""Starts a line to which no later line is joined: of a table, a command."""
_PRESET = re.compile(r"(\w+, )*\w+: ")
"""Starts a line that is not joined to the one before if that ends a sentence: names of presets."""


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
            f"batch {published.batch}" if _BATCH.match(published.batch) else published.batch,
            None if published.seconds is None else duration(published.seconds),
            None if published.accuracy is None else f"{percent(published.accuracy)} top-1",
        )
        table.add_row("", Text(" · ".join(figure for figure in figures if figure), style="dim"))
    console = Console()
    console.print(table)
    console.print(
        "\nBatch, time and top-1 are the papers' own, on their hardware and data, mostly ImageNet.",
        style="dim",
    )
    console.print("bigstep recipes NAME explains one; bigstep train NAME runs it on embedded data.", style="dim")


def print_recipe(recipe: Described, config: Mapping[str, Any]) -> None:
    """Print one recipe with its evidence and how to run it."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(Text.assemble((recipe.name, "bold"), f" · {recipe.summary}"))
    console.print(Text(f"techniques: {', '.join(recipe.techniques)}", style="cyan"))
    console.print(Text(f"presets:    {', '.join(recipe.presets)}", style="cyan"))
    workers = config["workers"]
    batch = workers["count"] * workers["local_batch"]
    share = f"{workers['count']} workers x {workers['local_batch']}"
    shown = f"{config['model']} on {config['data']['name']}, {share} = {batch:,}"
    console.print(Text(f"{config['preset']:<11} {shown}, {plural(config['epochs'], 'epoch')}", style="cyan"))
    console.print()
    console.print(Text(folded(recipe.docstring, console.width)), soft_wrap=True)


def folded(evidence: str, width: int) -> str:
    r"""Return a recipe's evidence with its lines broken at `width`: prose between words, commands as a shell
    reads them.

    A table that is too wide becomes a list of its rows.

    >>> print(folded("Batch\n    mini: one two three\n    four\n    paper: five", 20))
    Batch
        mini: one two
        three four
        paper: five
    >>> print(folded("    | run | time |\n    |-----|------|\n    | first | long ago |\n    bigstep train --lr 1", 18))
        - run: first ·
          time: long
          ago
        bigstep train \
          --lr 1
    """
    return "\n".join(_filled(each, width) for each in _paragraphs(_without_wide_tables(evidence, width)))


def _paragraphs(evidence: str) -> list[str]:
    """The lines, with each continuation joined to the sentence it continues."""
    paragraphs: list[str] = []
    for line in evidence.splitlines():
        before = paragraphs[-1] if paragraphs else ""
        indent = line[: len(line) - len(line.lstrip())]
        goes_on = line.strip() and before.strip() and before.startswith(indent) and before[len(indent)] != " "
        own = _KEPT.match(line.strip()) or _PRESET.match(line.strip()) and before.rstrip()[-1:] in ".:;)"
        if goes_on and indent and not own and not _WHOLE.match(before.strip()):
            paragraphs[-1] = f"{before} {line.strip()}"
        else:
            paragraphs.append(line)
    return paragraphs


def _without_wide_tables(evidence: str, width: int) -> str:
    """Turn each row of a table that is too wide into a list item: its cells, with the names of the columns."""

    def told(table: re.Match[str]) -> str:
        if max(map(len, table[0].splitlines())) <= width:
            return table[0]
        indent = " " * (len(table[0]) - len(table[0].lstrip()))
        names, _, *rows = (
            [cell.strip() for cell in row.strip().strip("|").split("|")] for row in table[0].splitlines()
        )
        cells = ([f"{name}: {cell}" for name, cell in zip(names, row, strict=True) if cell not in "–"] for row in rows)
        return "".join(f"{indent}- {' · '.join(row)}\n" for row in cells)

    return re.sub(r"(?:^ *\|.*\n)+", told, evidence, flags=re.M)


def _filled(paragraph: str, width: int) -> str:
    """Wrap one paragraph; a command is broken before options only, so that it can still be copied."""
    indent = paragraph[: len(paragraph) - len(paragraph.lstrip())]
    if paragraph.strip().startswith("|"):
        return paragraph
    if _WHOLE.match(paragraph.strip()):
        lines = [""]
        for word in re.split(r" (?=--\w)", re.sub(r" +#", "  #", paragraph)):
            longer = f"{lines[-1]} {word}" if lines[-1] else word
            if len(longer) <= width - 2 or not lines[-1]:
                lines[-1] = longer
            else:
                lines.append(f"{indent}  {word}")
        return " \\\n".join(lines)
    hanging = f"{indent}  " if paragraph.strip().startswith("- ") else indent
    return textwrap.fill(
        paragraph,
        width,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
