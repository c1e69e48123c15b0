"""The charts of the page as plotly figures: one line a group, so that 10,000 runs draw as fast as ten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigstep.report.compare import Group
from bigstep.report.figures import DRAWN, LEGEND, Chart, cut, figure, safe, style_of
from bigstep.report.series import Line, group_line
from bigstep.report.study import Study
from bigstep.report.tradeoffs import tradeoff_charts
from bigstep.report.words import duration, percent, plural

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["charts_of"]

BANDED = 6
"""Up to so many groups show the range of their seeds as a band; more bands would hide one another."""
POINTS = 3_000
"""Points of one chart over all its lines, which keeps a report small."""


def charts_of(study: Study) -> list[Chart]:
    """Draw every chart that the records have figures for."""
    unit, divide = _time_unit(study)
    several = len(study.groups) > 1 or len(study.outcomes) > 1
    found = [_finals(study)] if several else []
    found += [
        _curves(study, "accuracy-time", "Accuracy over time", "evaluations", "seconds", "accuracy", f"time ({unit})",
                "The steeper a line rises and the further left it ends, the sooner that accuracy was there.", divide),
        _curves(study, "accuracy-samples", "Accuracy over samples", "evaluations", "samples", "accuracy",
                "training samples seen", "Speed of the machine taken out: what each sample was worth."),
        _curves(study, "loss", "Training loss", "train", "epoch", "loss", "epoch",
                "Loss of the training batches, averaged over neighbouring steps."),
        _curves(study, "lr", "Learning rate", "train", "epoch", "lr", "epoch", "The rate that each step really used."),
        _curves(study, "batch", "Global batch", "train", "epoch", "batch", "epoch",
                f"{study.unit.capitalize()} in each step over all workers; an epoch's smaller last batch is left out."),
        _curves(study, "noise-scale", "Gradient noise scale", "train", "epoch", "noise_scale", "epoch",
                f"The batch, in {study.unit}, that needs twice the fewest possible steps; beyond it they are wasted."),
    ]  # fmt: skip
    charts = [chart for chart in [*found, *tradeoff_charts(study)] if chart is not None]
    charts.sort(key=lambda chart: not (chart.key == "against-batch" and chart.wide))  # what such a study is about
    narrow = [position for position, chart in enumerate(charts) if not chart.wide]
    if len(narrow) % 2:  # two stand side by side; the odd one takes the whole row
        charts[narrow[-1]] = replace(charts[narrow[-1]], wide=True)
    return charts


def _time_unit(study: Study) -> tuple[str, float]:
    longest = max((outcome.seconds or 0.0 for outcome in study.outcomes), default=0.0)
    return ("hours", 3_600.0) if longest > 7_200 else ("minutes", 60.0) if longest > 600 else ("seconds", 1.0)


def _curves(
    study: Study,
    key: str,
    title: str,
    kind: str,
    x: str,
    y: str,
    x_title: str,
    caption: str,
    divide: float = 1.0,
) -> Chart | None:
    """One line a group; the whole range of its seeds as a band where there is room."""
    groups = study.groups[:DRAWN]
    most = max(24, min(200, POINTS // len(groups)))
    lines = [(index, group, group_line(group.outcomes, kind, x, y, most)) for index, group in enumerate(groups)]
    drawn = [(index, group, line) for index, group, line in lines if line is not None]
    if not any(len(set(line.x)) > 1 for _, _, line in drawn):  # a dot is no curve; the tables have it
        return None
    scale = 100.0 if y == "accuracy" else 1.0
    hovermode = "x unified" if len(drawn) <= BANDED else "closest"
    names = {"accuracy": "accuracy (%)", "loss": "loss", "lr": "learning rate", "batch": study.unit,
             "noise_scale": study.unit}  # fmt: skip
    named = 1 < len(drawn) <= BANDED  # more names would leave no room; there the buttons above are the legend
    made = figure(x_title, names[y], hovermode=hovermode, showlegend=named, legend=LEGEND if named else None)
    for index, group, line in drawn:
        across = [value / divide for value in line.x]
        if line.low and len(drawn) <= BANDED:
            made.add_scatter(**_band(index, across, line, scale))
        color, dash = style_of(index)
        unit = " %" if y == "accuracy" else ""
        made.add_scatter(
            x=across,
            y=[round(scale * value, 6) for value in line.y],
            name=safe(group.label),
            mode="lines+markers" if len(across) <= 30 and kind == "evaluations" else "lines",
            line={"color": color, "dash": dash, "width": 2, "shape": "hv" if y == "batch" else "linear"},
            marker={"size": 5},
            meta={"group": index},
            hovertemplate=f"%{{y:.5~g}}{unit}" + ("" if hovermode == "x unified" else f"<br>{x} %{{x:.4~g}}"),
        )
    if y == "accuracy":
        caption += _focus(made, [line for _, _, line in drawn])
    if y in ("batch", "lr"):
        made.update_yaxes(rangemode="tozero")
    if y == "noise_scale":
        made.update_yaxes(type="log")  # it grows by orders of magnitude
    return Chart(key, title, caption, made.to_plotly_json())


def _band(index: int, across: Sequence[float], line: Line, scale: float) -> dict[str, Any]:
    color, _ = style_of(index)
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return {
        "x": [*across, *reversed(across)],
        "y": [round(scale * value, 6) for value in (*line.high, *reversed(line.low))],
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.16)",
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"group": index},
    }


def _focus(made: Figure, lines: Sequence[Line]) -> str:
    """Start the axis where the lines part from one another, not at the first epoch's accuracy."""
    top, bottom = max(max(line.y) for line in lines), min(min(line.y) for line in lines)
    if top - bottom <= 0.3:
        return ""
    floor = max(0.0, top - (0.15 if len(lines) > 1 else 0.25))
    made.update_yaxes(range=[100 * floor, 100 * (top + 0.01)])
    return f" The axis starts at {100 * floor:.0f} %; double-click the chart to see all of it."


def _finals(study: Study) -> Chart | None:
    """Every seed a dot, the median a bar, best group on top."""
    groups = [group for group in study.groups if group.median is not None][:DRAWN]
    if not groups:
        return None
    best = groups[0].median or 0.0
    near = [value for group in groups for value in group.accuracies if best - value <= 0.15]
    floor, ceiling = min(near), max(near)
    room = max(0.002, 0.06 * (ceiling - floor))
    made = figure("accuracy (%)", "", height=max(220, 70 + 30 * len(groups)))
    edge = floor - 2.5 * room
    for index, group in enumerate(groups):
        _dots(made, study.groups.index(group), group, index, floor, edge + 0.6 * room)
    made.update_xaxes(range=[100 * edge, 100 * (ceiling + room)])
    made.update_yaxes(
        autorange="reversed",
        tickvals=list(range(len(groups))),
        ticktext=[safe(cut(group.label)) for group in groups],
        showgrid=False,
    )
    outside = any(group.accuracies[0] < floor for group in groups)
    caption = f"Every seed is a dot, the bar is the median; {groups[0].label} on top with {percent(best)}."
    caption += " ◂ marks what lies beyond the left edge." if outside else ""
    return Chart("finals", "Final accuracy", caption, made.to_plotly_json(), wide=True)


def _dots(made: Figure, index: int, group: Group, row: int, floor: float, beyond: float) -> None:
    """Draw the seeds of one group; what lies under `floor` becomes one mark at `beyond`, left of every dot."""
    color, _ = style_of(index)
    told = f"{safe(group.label)}<br>median {percent(group.median)}, {plural(group.n, 'seed')}"
    told += f"<br>{duration(group.median_of('seconds'))}"
    inside = [100 * value for value in group.accuracies if value >= floor]
    common = {"mode": "markers", "meta": {"group": index}, "name": safe(group.label)}
    if inside:
        made.add_scatter(
            x=[round(value, 4) for value in inside],
            y=[row] * len(inside),
            marker={"color": color, "size": 9, "opacity": 0.75},
            hovertemplate=f"%{{x:.2f}} %<br>{told}<extra></extra>",
            **common,
        )
    if (group.median or 0.0) >= floor:
        made.add_scatter(
            x=[round(100 * (group.median or 0.0), 4)],
            y=[row],
            marker={"symbol": "line-ns", "size": 20, "line": {"color": color, "width": 3}},
            hovertemplate=f"{told}<extra></extra>",
            **common,
        )
    if group.accuracies[0] < floor:
        made.add_scatter(
            x=[round(100 * beyond, 4)],
            y=[row],
            marker={"symbol": "triangle-left", "size": 11, "color": color},
            text=[f" {percent(group.accuracies[0])}"],
            textposition="middle right",
            hovertemplate=f"{told}<extra></extra>",
            **{**common, "mode": "markers+text"},
        )
