"""The page's two tables as columns and cells: groups over seeds, and all runs.

A cell is its text, or [text, sort key], or [text, sort key, link target].
"""

from __future__ import annotations

from typing import Any

from bigstep.report.compare import Group
from bigstep.report.study import Study
from bigstep.report.words import clean, count, duration, size

__all__ = ["anchor", "effects_grid", "groups_grid", "runs_grid"]

DETAILED = 100
"""Groups that have a section of their own in the page."""


def anchor(index: int) -> str:
    """Name the section about the group at this position."""
    return f"group-{index}"


def groups_grid(study: Study) -> dict[str, Any]:
    """Lay out one row a group."""
    measure = study.measure
    goal = "Time to target" if study.target is None else f"To {measure.goal(study.target)}"
    columns = [
        _column("Group"), _column(measure.name.capitalize(), True), _column("Standing"),
        _column(f"Range{f' ({measure.of_gap.strip()})' if measure.of_gap else ''}", True),
        _column("Seeds", True), _column(goal, True), _column("Time", True), _column("Batch", True),
        _column(f"{study.speed_unit.capitalize()}/s", True), _column("Bytes sent", True), _column("Noise scale", True),
    ]  # fmt: skip
    rows = []
    for index, group in enumerate(study.groups):
        reached = None if study.target is None else group.seconds_to(study.target)
        rows.append(
            [
                _named(index, group),
                _cell(measure.cell(group.median), group.median),
                [study.standing(index), index],
                _cell(measure.plain_gap(group.spread) if group.n > 1 else "–", group.spread),
                _cell(count(group.n), group.n),
                _cell(duration(reached), reached),
                _cell(duration(group.median_of("seconds")), group.median_of("seconds")),
                _cell(_ends(group.outcomes[0].batches), group.median_of("batch")),
                _cell(count(group.median_of(study.speed_name)), group.median_of(study.speed_name)),
                _cell(size(group.median_of("bytes_sent")), group.median_of("bytes_sent")),
                _cell(count(group.median_of("noise_scale")), group.median_of("noise_scale")),
            ]
        )
    return _grid("groups", "Groups, best first", columns, rows)


def effects_grid(study: Study) -> dict[str, Any]:
    """Lay out one row for each technique that was left out of a system."""
    columns = [
        _column("System"), _column("Technique"), _column(f"Brings ({study.measure.of_gap.strip() or 'loss'})", True),
        _column("Sure?"), _column("Costs (time)", True), _column("Failed without", True),
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for effect in study.effects:
        system, technique, brings, sure, costs = effect.words
        failed = _cell(count(effect.failures), effect.failures)
        rows.append([system, technique, _cell(brings, effect.brings), sure, _cell(costs, effect.costs), failed])
    return _grid("effects", "What each technique brings", columns, rows)


def runs_grid(study: Study) -> dict[str, Any]:
    """Lay out one row a run."""
    measure, perplexity = study.measure, [_column("Perplexity", True)] if study.is_text else []
    last_five = [_column("Last five epochs", True)] if measure.key == "accuracy" else []
    columns = [
        _column("Group"), _column("Seed", True), _column("Status"), _column(measure.name.capitalize(), True),
        *perplexity, *last_five, _column("Training loss" if measure.key == "eval_loss" else "Loss", True),
        _column("Time", True), _column("Samples", True), _column("Batch", True), _column("Workers", True),
        _column("Ranks", True), _column(f"{study.speed_unit.capitalize()}/s", True), _column("Noise scale", True),
        _column("Run"),
    ]  # fmt: skip
    rows = [
        [
            _named(index, group),
            _cell("–" if run.seed is None else str(run.seed), run.seed),
            run.status,
            _cell(measure.cell(run.score(measure.key)), run.score(measure.key)),
            *(
                [_cell("–" if run.perplexity is None else f"{run.perplexity:.2f}", run.perplexity)]
                if study.is_text
                else []
            ),
            *([_cell(measure.cell(run.accuracy_last5), run.accuracy_last5)] if last_five else []),
            _cell("–" if run.loss is None else f"{run.loss:.4f}", run.loss),
            _cell(duration(run.seconds), run.seconds),
            _cell(count(run.samples), run.samples),
            _cell(_ends(run.batches), run.batch),
            _cell(count(run.workers), run.workers),
            _cell(count(run.ranks), run.ranks),
            _cell(count(getattr(run, study.speed_name)), getattr(run, study.speed_name)),
            _cell(count(run.noise_scale), run.noise_scale),
            clean(run.folder.name, 60),
        ]
        for index, group in enumerate(study.groups)
        for run in group.outcomes
    ]
    return _grid("runs", "All runs", columns, rows)


def _grid(key: str, title: str, columns: list[dict[str, Any]], rows: list[list[Any]]) -> dict[str, Any]:
    names = (row[0] if isinstance(row[0], str) else row[0][0] for row in rows)
    widest = max(map(len, names), default=0)  # sets a column's width: long names wrap, short ones leave room
    return {"key": key, "title": title, "columns": columns, "rows": rows, "widest": widest}


def _column(name: str, numeric: bool = False) -> dict[str, Any]:
    return {"name": name, "numeric": numeric}


def _cell(text: str, value: float | None) -> list[Any]:
    return [text, None if value is None else float(f"{value:.6g}")]


def _ends(batches: str) -> str:
    """First and last stage; a table has no room for those between."""
    stages = batches.split(" → ")
    return batches if len(stages) < 3 else f"{stages[0]} → {stages[-1]}"


def _named(index: int, group: Group) -> list[Any]:
    return [group.label, None, f"#{anchor(index)}"] if index < DETAILED else [group.label, None]
