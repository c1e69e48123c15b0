"""The charts of the page as plotly figures: one line a group, so that 10,000 runs draw as fast as ten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bigstep.report.compare import Group
from bigstep.report.figures import DRAWN, LEGEND, Chart, cut, figure, safe, style_of
from bigstep.report.measure import Measure
from bigstep.report.series import Line, group_line
from bigstep.report.study import Study
from bigstep.report.tradeoffs import tradeoff_charts
from bigstep.report.words import duration, plural

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["charts_of"]

BANDED = 6
"""Up to this many groups show the range of their seeds as a band; more bands would hide one another."""
POINTS = 3_000
"""Points of one chart over all its lines, which keeps a report small."""


def charts_of(study: Study) -> list[Chart]:
    """Draw every chart that the records have figures for."""
    unit, divide = _time_unit(study)
    several = len(study.groups) > 1 or len(study.outcomes) > 1
    found = [_finals(study)] if several else []
    measure = study.measure
    key, named = measure.key.replace("_", "-"), measure.name.capitalize()
    amount, each = ("tokens", "token") if study.is_text else ("samples", "sample")
    found += [
        _curves(study, f"{key}-time", f"{named} over time", "evaluations", "seconds", measure.key, f"time ({unit})",
                f"The steeper a line {'falls' if measure.falls else 'rises'} and the further left it ends, the sooner "
                f"that {measure.name} was reached.", divide),
        _curves(study, f"{key}-samples", f"{named} over {amount}", "evaluations", amount, measure.key,
                f"training {amount} seen", f"What each {each} was worth, whatever the speed of the machine."),
        _curves(study, "perplexity", "Perplexity", "evaluations", amount, "perplexity", f"training {amount} seen",
                "How many equally likely tokens would be as uncertain (held-out text).") if study.is_text else None,
        _curves(study, "loss", "Training loss", "train", "epoch", "loss", "epoch",
                "Loss of the training batches, averaged over neighbouring steps."),
        _curves(study, "lr", "Learning rate", "train", "epoch", "lr", "epoch", "The rate that each step really used."),
        _curves(study, "batch", "Global batch", "train", "epoch", "batch", "epoch",
                f"{study.unit.capitalize()} in each step over all workers; an epoch's smaller last batch is left out."),
        _curves(study, "noise-scale", "Gradient noise scale", "train", "epoch", "noise_scale", "epoch",
                f"The batch, in {study.unit}, that needs twice the fewest possible steps; larger ones waste samples."),
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
    if not any(len(set(line.x)) > 1 for _, _, line in drawn):  # one point is not a curve; the tables have it
        return None
    measure = study.measure if y == study.measure.key else None
    scale = measure.scale if measure else 1.0
    hovermode = "x unified" if len(drawn) <= BANDED else "closest"
    names = {"loss": "loss", "lr": "learning rate", "batch": study.unit, "noise_scale": study.unit,
             "perplexity": "perplexity", study.measure.key: study.measure.axis}  # fmt: skip
    named = 1 < len(drawn) <= BANDED  # more names leave no room; then the buttons above are the legend
    made = figure(x_title, names[y], hovermode=hovermode, showlegend=named, legend=LEGEND if named else None)
    for index, group, line in drawn:
        across = [value / divide for value in line.x]
        if line.low and len(drawn) <= BANDED:
            made.add_scatter(**_band(index, across, line, scale))
        color, dash = style_of(index)
        unit = " %" if scale == 100.0 else ""
        made.add_scatter(
            x=across,
            y=[round(scale * value, 6) for value in line.y],
            name=safe(cut(group.label, 40)),
            mode="lines+markers" if len(across) <= 30 and kind == "evaluations" else "lines",
            line={"color": color, "dash": dash, "width": 2, "shape": "hv" if y == "batch" else "linear"},
            marker={"size": 5},
            meta={"group": index},
            hovertemplate=f"%{{y:.5~g}}{unit}" + ("" if hovermode == "x unified" else f"<br>{x} %{{x:.4~g}}"),
        )
    if measure:
        caption += _focus(made, [line for _, _, line in drawn], measure)
    if y in ("batch", "lr"):
        made.update_yaxes(rangemode="tozero")
    if y in ("noise_scale", "perplexity"):
        # both span orders of magnitude; with more ticks, a nearly flat line is labelled with digits without zeros
        made.update_yaxes(type="log", nticks=5, tickformat="~s")
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


def _focus(made: Figure, lines: Sequence[Line], measure: Measure) -> str:
    """End the axis where the lines separate, not at the result of the first epoch."""
    every = [value for line in lines for value in line.y]
    best, worst = measure.best(every), measure.worst(every)
    if abs(best - worst) <= 2 * measure.near:
        return ""
    room = (1.0 if len(lines) > 1 else 5 / 3) * measure.near
    edge = best + room if measure.falls else max(0.0, best - room)
    beyond = best - measure.near / 15 if measure.falls else best + measure.near / 15
    made.update_yaxes(range=sorted([measure.scale * edge, measure.scale * beyond]))
    ends = "ends" if measure.falls else "starts"
    shown = f"{edge:.1f}" if measure.falls else f"{100 * edge:.0f} %"
    return f" The axis {ends} at {shown}; double-click the chart to see all of it."


def _finals(study: Study) -> Chart | None:
    """Each seed is a dot, the median a bar; the best group is on top."""
    groups = [group for group in study.groups if group.median is not None][:DRAWN]
    if not groups:
        return None
    measure, best = study.measure, groups[0].median or 0.0
    near = [value for group in groups for value in group.scores if measure.gain(best, value) <= measure.near]
    last, first = measure.worst(near), measure.best(near)
    room = max(measure.near / 75, 0.06 * abs(first - last)) * (-1 if measure.falls else 1)  # towards the better side
    made = figure(measure.axis, "", height=max(220, 70 + 30 * len(groups)))
    edge = last - 2.5 * room
    for index, group in enumerate(groups):
        _dots(made, study.groups.index(group), group, index, last, edge + 0.6 * room)
    made.update_xaxes(range=sorted([measure.scale * edge, measure.scale * (first + room)]))
    made.update_yaxes(
        autorange="reversed",
        tickvals=list(range(len(groups))),
        ticktext=[safe(cut(group.label)) for group in groups],
        showgrid=False,
    )
    outside = any(not measure.reaches(value, last) for group in groups for value in group.scores)
    caption = f"Every seed is a dot, the bar is the median; {groups[0].label} on top with {measure.text(best)}."
    mark, side = ("▸", "right") if measure.falls else ("◂", "left")
    caption += f" {mark} marks what lies beyond the {side} edge." if outside else ""
    return Chart("finals", f"Final {measure.name}", caption, made.to_plotly_json(), wide=True)


def _dots(made: Figure, index: int, group: Group, row: int, last: float, beyond: float) -> None:
    """Draw the seeds of one group; results worse than `last` become one mark at `beyond`, past every dot."""
    color, _ = style_of(index)
    measure, scale = group.measure, group.measure.scale
    told = f"{safe(group.label)}<br>median {measure.cell(group.median)}, {plural(group.n, 'seed')}"
    told += f"<br>{duration(group.median_of('seconds'))}"
    inside = [scale * value for value in group.scores if measure.reaches(value, last)]
    common = {"mode": "markers", "meta": {"group": index}, "name": safe(group.label)}
    if inside:
        made.add_scatter(
            x=[round(value, 4) for value in inside],
            y=[row] * len(inside),
            marker={"color": color, "size": 9, "opacity": 0.75},
            hovertemplate=f"%{{x:.{measure.digits}f}}{' %' if scale == 100.0 else ''}<br>{told}<extra></extra>",
            **common,
        )
    if group.median is not None and measure.reaches(group.median, last):
        made.add_scatter(
            x=[round(scale * group.median, 4)],
            y=[row],
            marker={"symbol": "line-ns", "size": 20, "line": {"color": color, "width": 3}},
            hovertemplate=f"{told}<extra></extra>",
            **common,
        )
    worst = measure.worst(group.scores)
    if not measure.reaches(worst, last):
        made.add_scatter(
            x=[round(scale * beyond, 4)],
            y=[row],
            marker={"symbol": "triangle-right" if measure.falls else "triangle-left", "size": 11, "color": color},
            text=[f"{measure.cell(worst)} " if measure.falls else f" {measure.cell(worst)}"],
            textposition="middle left" if measure.falls else "middle right",
            hovertemplate=f"{told}<extra></extra>",
            **{**common, "mode": "markers+text"},
        )
