"""Charts of trade-offs: accuracy against batch, speed against ranks, bytes, staleness, time."""

from __future__ import annotations

import math
from collections.abc import Mapping

from bigstep.report.compare import Group
from bigstep.report.figures import DRAWN, LEGEND, PALETTE, Chart, cut, figure, safe, style_of
from bigstep.report.outcome import PARTS, Outcome
from bigstep.report.series import curve
from bigstep.report.study import Study
from bigstep.report.words import number

__all__ = ["tradeoff_charts"]

PART_COLORS = {"compute": PALETTE[0], "exchange": PALETTE[1], "data": PALETTE[5]}
SPLIT_CAPTION = "Where the time of a step goes; exchange is only what computation does not hide."


def tradeoff_charts(study: Study) -> list[Chart | None]:
    """Draw every chart that the records allow; None stands for one whose figures they lack."""
    return [_against_batch(study), _scaling(study), _against_bytes(study), _staleness(study), _split(study)]


def _split(study: Study) -> Chart | None:
    return _split_over_epochs(study.outcomes[0]) if len(study.outcomes) == 1 else _split_by_group(study)


def _split_over_epochs(run: Outcome) -> Chart | None:
    """Stacked areas: the seconds that 1,000 samples took, over the course of the run."""
    rows = [row for row in run.train if number(row.get("batch"))]
    if not run.per_1000 or len(rows) < 2:
        return None
    made = figure("epoch", f"seconds per 1,000 {run.unit}", hovermode="x unified", showlegend=True, legend=LEGEND)
    for part in PARTS:
        relative = [{**row, "each": 1_000 * (number(row.get(f"{part}_s")) or 0.0) / row["batch"]} for row in rows]
        _, across, values = curve(relative, "epoch", "each", 120)
        made.add_scatter(
            x=[float(f"{value:.5g}") for value in across],
            y=[float(f"{value:.5g}") for value in values],
            name=part,
            mode="lines",
            stackgroup="parts",
            line={"color": PART_COLORS[part], "width": 1},
            hovertemplate="%{y:.3~g} s",
        )
    return Chart("split", "Compute, exchange, data", SPLIT_CAPTION, made.to_plotly_json())


def _split_by_group(study: Study) -> Chart | None:
    """Bars of the seconds that 1,000 samples take, split into compute, exchange and data."""
    groups = [group for group in study.groups[:DRAWN] if any(outcome.per_1000 for outcome in group.outcomes)]
    if not groups:
        return None
    made = figure(f"seconds per 1,000 {study.unit}", "", height=max(340, 100 + 26 * len(groups)))
    made.update_layout(barmode="stack", showlegend=True, legend=LEGEND, bargap=0.35)
    for part in PARTS:
        values = [_mean([outcome.per_1000.get(part) for outcome in group.outcomes]) for group in groups]
        made.add_bar(
            x=[float(f"{value:.5g}") for value in values],
            y=list(range(len(groups))),
            orientation="h",
            name=part,
            marker={"color": PART_COLORS[part]},
            customdata=[safe(group.label) for group in groups],
            hovertemplate=f"%{{customdata}}<br>{part} %{{x:.3~g}} s<extra></extra>",
        )
    made.update_yaxes(
        autorange="reversed",
        tickvals=list(range(len(groups))),
        ticktext=[safe(cut(group.label)) for group in groups],
        showgrid=False,
    )
    return Chart("split", "Compute, exchange, data", SPLIT_CAPTION, made.to_plotly_json(), wide=len(groups) > 6)


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _by_recipe(study: Study, name: str, *, timed: bool = False) -> dict[str, dict[float, Group]]:
    """For each recipe (or name given by a suite), the best group at each value of a figure, if there are two or more.

    If `timed`, groups that took too few steps for a speed are left out.
    """
    found: dict[tuple[str, str, str], dict[float, Group]] = {}
    for group in study.groups:  # best first, so the first at a value is the best there
        value = group.median_of(name)
        if value is not None and group.median is not None and (group.got_going or not timed):
            found.setdefault(group.subject, {}).setdefault(value, group)
    curves = {subject: points for subject, points in found.items() if len(points) > 1}
    names = [recipe for recipe, _, _ in curves]
    return {s[0] if names.count(s[0]) == 1 else " · ".join(s): points for s, points in curves.items()}


def _against_batch(study: Study) -> Chart | None:
    recipes = _by_recipe(study, "batch")
    if not recipes:
        return None
    measure = study.measure
    made = figure("global batch (log scale)", measure.axis, showlegend=True, legend=LEGEND)
    ticks: set[float] = set()
    for index, (recipe, points) in enumerate(list(recipes.items())[:DRAWN]):
        color, dash = style_of(index)
        batches = sorted(points)
        ticks.update(batches)
        medians = [points[batch].median or 0.0 for batch in batches]
        made.add_scatter(
            x=batches,
            y=[round(measure.scale * median, 4) for median in medians],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [measure.scale * (points[b].scores[-1] - m) for b, m in zip(batches, medians, strict=True)],
                "arrayminus": [
                    measure.scale * (m - points[b].scores[0]) for b, m in zip(batches, medians, strict=True)
                ],
                "thickness": 1.2,
                "width": 3,
            },
            name=safe(cut(recipe, 40)),
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2},
            hovertemplate=f"{safe(recipe)}<br>batch %{{x:,}}<br>%{{y:.{measure.digits}f}}"
            + f"{' %' if measure.scale == 100.0 else ''}<extra></extra>",
        )
    shown = _apart(sorted(ticks))
    made.update_xaxes(type="log", tickvals=shown, ticktext=[f"{tick:,.0f}" for tick in shown])
    worsens = f"{measure.name} {'rise' if measure.unit else 'rises'}" if measure.falls else f"{measure.name} falls"
    caption = f"How far each system can grow its batch before {worsens}; whiskers span the seeds."
    study_of_batches = len(shown) > 2  # then this is what the study is about
    return Chart(
        "against-batch",
        f"{measure.name.capitalize()} against batch",
        caption,
        made.to_plotly_json(),
        wide=study_of_batches,
    )


def _apart(values: list[float]) -> list[float]:
    """Select, from rising values, those whose labels do not overlap on a logarithmic axis.

    >>> _apart([120, 128, 512, 520, 1024])
    [120, 512, 1024]
    """
    least = max(1.25, (values[-1] / values[0]) ** (1 / 12))
    kept = values[:1]
    for value in values[1:]:
        if value >= least * kept[-1]:
            kept.append(value)
    return kept


def _against_bytes(study: Study) -> Chart | None:
    groups = [
        (index, group, sent)
        for index, group in enumerate(study.groups[:DRAWN])
        if (sent := group.median_of("bytes_sent")) and group.median is not None
    ]
    if len({round(sent) for _, _, sent in groups}) < 2:
        return None
    measure = study.measure
    made = figure("megabytes sent by a rank over the run (log scale)", measure.axis)
    best = measure.best([group.median or 0.0 for _, group, _ in groups])
    for index, group, sent in groups:
        color, _ = style_of(index)
        made.add_scatter(
            x=[float(f"{sent / 1e6:.5g}")],
            y=[round(measure.scale * (group.median or 0.0), 4)],
            mode="markers",
            marker={"color": color, "size": 11},
            meta={"group": index},
            hovertemplate=f"{safe(group.label)}<br>%{{x:,.4~g}} MB<br>{measure.cell(group.median)}<extra></extra>",
        )
    medians = [group.median or 0.0 for _, group, _ in groups]
    near, room = [median for median in medians if measure.gain(best, median) <= measure.near], measure.near / 30
    made.update_yaxes(range=[measure.scale * (min(near) - room), measure.scale * (max(near) + room)])
    sizes = [sent / 1e6 for _, _, sent in groups]
    ticks = [k * 10.0**power for power in range(-6, 9) for k in (1, 2, 3, 5)]
    shown = [tick for tick in ticks if min(sizes) / 2.5 <= tick <= 2.5 * max(sizes)]
    if len(shown) > 8:
        shown = [tick for tick in shown if f"{tick:e}"[0] == "1"]
    ends = [math.log10(min(sizes) / 1.4), math.log10(max(sizes) * 1.4)]
    made.update_xaxes(type="log", range=ends, tickvals=shown, ticktext=[f"{tick:,.10g}" for tick in shown])
    caption = "Further left is less traffic; fewer bytes pay off only where the network is the bottleneck."
    if hidden := len(medians) - len(near):
        caption += (
            f" {hidden} more {'lies' if hidden == 1 else 'lie'} beyond the edge; double-click the chart to see all."
        )
    return Chart("against-bytes", f"Bytes against {measure.name}", caption, made.to_plotly_json())


def _scaling(study: Study) -> Chart | None:
    recipes = _by_recipe(study, "ranks", timed=True)
    if not recipes:
        return None
    made = figure("ranks", f"{study.speed_unit} a second", showlegend=True, legend=LEGEND)
    for index, (recipe, points) in enumerate(list(recipes.items())[:DRAWN]):
        color, dash = style_of(index)
        ranks = sorted(points)
        rates = [points[rank].median_of(study.speed_name) or 0.0 for rank in ranks]
        ideal = [rates[0] * rank / ranks[0] for rank in ranks]
        shares = [f"{rate / full:.0%}" if full else "–" for rate, full in zip(rates, ideal, strict=True)]
        made.add_scatter(
            x=ranks,
            y=[round(rate, 2) for rate in rates],
            name=safe(cut(recipe, 40)),
            mode="lines+markers+text",
            text=shares,
            textposition="bottom right",
            cliponaxis=False,
            line={"color": color, "dash": dash, "width": 2},
            hovertemplate=f"%{{x}} ranks<br>%{{y:,.0f}} {study.speed_unit}/s<br>%{{text}} of ideal<extra></extra>",
        )
        made.add_scatter(
            x=ranks,
            y=[round(rate, 2) for rate in ideal],
            name=f"{safe(cut(recipe, 32))}, ideal",
            mode="lines",
            line={"color": color, "width": 1, "dash": "dot"},
            hoverinfo="skip",
        )
    made.update_xaxes(dtick=1 if max(max(points) for points in recipes.values()) <= 16 else None)
    made.update_yaxes(rangemode="tozero")
    caption = "Speed against ranks; the percentages are the share of a perfect speed-up over the fewest ranks."
    return Chart("scaling", "Scaling", caption, made.to_plotly_json())


def _staleness(study: Study) -> Chart | None:
    """Bars: how many updates old the weights behind each gradient were, where `result.staleness` counts it."""
    counted = []
    for index, group in enumerate(study.groups[:DRAWN]):
        total: dict[int, float] = {}
        for outcome in group.outcomes:
            result = outcome.run.facts.get("result")
            told = result.get("staleness") if isinstance(result, Mapping) else None
            pairs = told.items() if isinstance(told, Mapping) else enumerate(told) if isinstance(told, list) else ()
            for age, times in pairs:
                if str(age).isdecimal() and (seen := number(times)) is not None:
                    total[int(age)] = total.get(int(age), 0.0) + seen
        if sum(total.values()):
            counted.append((index, group, total))
    if not counted:
        return None
    made = figure("updates applied since the weights were read", "share of gradients (%)")
    made.update_layout(barmode="group", bargap=0.15)
    for index, group, total in counted:
        everything = sum(total.values())
        ages = sorted(total)
        made.add_bar(
            x=ages,
            y=[round(100 * total[age] / everything, 3) for age in ages],
            name=safe(group.label),
            marker={"color": style_of(index)[0]},
            meta={"group": index},
            hovertemplate=f"{safe(group.label)}<br>%{{x}} updates old: %{{y:.1f}} %<extra></extra>",
        )
    caption = "How stale gradients were when they were applied; in synchronous training it is always zero."
    return Chart("staleness", "Staleness", caption, made.to_plotly_json())
