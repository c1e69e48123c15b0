"""Reports for a terminal: summary, this run beside the published result, groups side by side, small charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigstep.records import Run
from bigstep.report.plots import COLORS, draw
from bigstep.report.study import Study, study_of
from bigstep.report.words import clean, count, duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["print_summary", "summary"]

SHOWN = 30
DRAWN = len(COLORS)


def print_summary(runs: Sequence[Run] | Study, console: Console | None = None) -> None:
    """Print the report of the runs; to standard output unless another console is given."""
    from rich.console import Console

    console = console or Console()
    console.print(summary(runs, width=console.width))


def summary(runs: Sequence[Run] | Study, *, width: int = 80) -> RenderableType:
    """Return the report of the runs as one rich renderable, for a terminal of `width` columns."""
    from rich.console import Group
    from rich.text import Text

    study = study_of(runs)
    parts: list[RenderableType] = [Text(study.title, style="bold"), *map(Text, study.sentences()), Text()]
    if len(study.outcomes) > 1:
        parts += [_groups(study, width), Text()]
        parts += [_effects(study), Text()] if study.effects else []
    else:
        parts += [table for table in (_published(study),) if table is not None]
        for note in list(dict.fromkeys(study.outcomes[0].run.notes))[:5]:
            parts.append(Text(f"Note: {clean(note)}", style="yellow"))
    parts += _charts(study, min(width, 100))
    return Group(*parts)


def _published(study: Study) -> RenderableType | None:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not study.published:
        return None
    _, published = study.published[0]
    table = Table(box=box.SIMPLE_HEAD, title="This run beside the published result", title_justify="left")
    table.add_column("")
    table.add_column("here", style="bold")
    table.add_column(Text(published.system))
    for what, here, there in published.rows:
        table.add_row(Text(what), Text(here), Text(there))
    told = (*published.differences, published.note, f"Source: {published.source}")
    differs = [Text(f"• {text}", style="dim") for text in told if text]
    return Group(table, Text("What differs"), *differs, Text())


def _groups(study: Study, width: int) -> Table:
    """Groups, best first; the least informative columns are dropped until the rest fits."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    measure = study.measure
    goal = "to target" if study.target is None else f"to {measure.goal(study.target)}"
    columns: dict[str, list[str]] = {}
    for position, group in enumerate(study.groups[:SHOWN]):
        cells = {
            "group": group.label,
            "seeds": count(group.n),
            measure.name: measure.cell(group.median),
            "range": measure.plain_gap(group.spread) if group.n > 1 else "–",
            goal: duration(None if study.target is None else group.seconds_to(study.target)),
            "time": duration(group.median_of("seconds")),
            "batch": group.outcomes[0].batches,
            f"{study.speed_unit}/s": count(group.median_of(study.speed_name)),
            "standing": study.standing(position),
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    for name in (f"{study.speed_unit}/s", "batch", "time", "range", "seeds", goal):
        if sum(max(len(name), *map(len, cells)) + 3 for name, cells in columns.items()) <= width:
            break
        del columns[name]
    table = Table(box=box.SIMPLE_HEAD, caption=_rest(study), caption_justify="left")
    for name in columns:
        words = name in ("group", "standing")
        table.add_column(Text(name), justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for position, row in enumerate(zip(*columns.values(), strict=True)):
        style = (
            "bold green"
            if study.standing(position).startswith("best")
            else "red"
            if study.groups[position].failures
            else ""
        )
        table.add_row(*map(Text, row), style=style)
    return table


def _effects(study: Study) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title="What each technique brings", title_justify="left")
    for name in ("system", "technique", f"brings ({study.measure.of_gap.strip() or 'loss'})", "sure?", "costs (time)"):
        table.add_column(Text(name), justify="right" if "(" in name else "left")
    for effect in study.effects:
        table.add_row(*map(Text, effect.words), style="bold" if effect.verdict == "apart" else "")
    return table


def _rest(study: Study) -> str | None:
    hidden = len(study.groups) - SHOWN
    return f"{count(hidden)} more groups are in --csv, --json and the page." if hidden > 0 else None


def _charts(study: Study, width: int) -> list[RenderableType]:
    from rich.text import Text

    from bigstep.report.series import group_line  # imports numpy, which only drawing needs

    charts: list[RenderableType] = []
    for title, kind, y, write in (
        (
            study.measure.name,
            "evaluations",
            study.measure.key,
            "{:.3f}".format if study.measure.falls else "{:.1%}".format,
        ),
        ("training loss", "train", "loss", "{:.3g}".format),
    ):
        drawn = [(group.label, group_line(group.outcomes, kind, "epoch", y, 200)) for group in study.groups[:DRAWN]]
        lines = [(name, line.x, line.y) for name, line in drawn if line is not None and len(line.x) > 1]
        if lines:
            more = f" (the best {DRAWN} groups)" if len(study.groups) > DRAWN else ""
            charts += [draw(title + more, lines, width=width, write=write), Text()]
    return charts
