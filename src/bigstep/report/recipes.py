"""The recipes on a terminal: a table of all, or one with its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bigstep.report.figures import cut
from bigstep.report.words import duration, percent, plural

if TYPE_CHECKING:
    from bigstep.config import Published

__all__ = ["print_recipe", "print_recipes"]


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
            f"batch {cut(published.batch, 40)}",
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
    console.print(Text(recipe.docstring), soft_wrap=True)  # its tables must not be broken
