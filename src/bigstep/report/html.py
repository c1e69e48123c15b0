"""The report as one HTML file that needs nothing else: no network, no server, no second file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bigstep
from bigstep.errors import ConfigError
from bigstep.pages import pack, packed_plotly, unpack_script
from bigstep.records import Run, write_atomically
from bigstep.report.charts import charts_of
from bigstep.report.compare import RULE
from bigstep.report.details import details_of
from bigstep.report.figures import DRAWN, style_of
from bigstep.report.grid import effects_grid, groups_grid, runs_grid
from bigstep.report.study import Study, study_of
from bigstep.report.words import count, duration, plural

__all__ = ["write_html"]

TEMPLATES = Path(__file__).parent / "templates"
STATIC_ROWS = 100
"""Rows that stand in the page itself, for print and for browsers without JavaScript; the rest is in its data."""


def write_html(runs: Sequence[Run] | Study, path: Path) -> None:
    """Write one self-contained page about the runs.

    Args:
        runs: What `gather` found; one run gives a page about it, several are compared.
        path: The file to write; an existing one is replaced.
    """
    page = render(study_of(runs))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.encode())
    except OSError as error:
        raise ConfigError(f"The report {path} cannot be written ({error.strerror}); choose another file.") from None


def render(study: Study) -> str:
    """Return the page about a study."""
    from jinja2 import Environment, FileSystemLoader

    charts = charts_of(study)
    grids = [groups_grid(study), runs_grid(study)] if len(study.outcomes) > 1 else []
    if study.effects:
        grids.insert(0, effects_grid(study))
    payload = {
        "figures": {chart.key: chart.figure for chart in charts},
        "grids": {grid["key"]: {"columns": grid["columns"], "rows": grid["rows"]} for grid in grids},
    }
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        line_comment_prefix=None,
    )
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    return environment.get_template("report.html").render(
        study=study,
        sentences=study.sentences(),
        tiles=_tiles(study),
        charts=charts,
        chips=_chips(study),
        grids=grids,
        static_rows=STATIC_ROWS,
        details=details_of(study),
        published=study.published,
        compared=_compared(study),
        rule=RULE,
        payload=pack(json.dumps(payload, allow_nan=False, separators=(",", ":")).encode()),
        plotly=packed_plotly(),
        unpack_script=unpack_script(),
        css=(TEMPLATES / "report.css").read_text("utf-8"),
        javascript=(TEMPLATES / "report.js").read_text("utf-8"),
        version=bigstep.__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _compared(study: Study) -> list[str]:
    """The columns of recipes beside their papers: all rows that occur, since images and text differ in theirs."""
    rows = (what for _, paper in study.published for what, _, _ in paper.rows)
    return [what for what in dict.fromkeys(rows) if what not in ("data", "workers", "hardware")]


def _chips(study: Study) -> list[dict[str, Any]]:
    """The legend that all charts share: one button a group."""
    named = enumerate(study.groups[:DRAWN])
    return [{"index": i, "label": g.label, "color": style_of(i)[0], "dash": style_of(i)[1]} for i, g in named]


def _noise(scale: float | None) -> str:
    return "" if scale is None else f", noise scale {count(scale)}"


def _tiles(study: Study) -> list[Mapping[str, str]]:
    """Three or four figures to read at a glance."""
    best = study.groups[0]
    measure = study.measure
    goal = "" if study.target is None else measure.goal(study.target)
    fastest = None if study.target is None else best.seconds_to(study.target)
    if len(study.outcomes) == 1:
        run = study.outcomes[0]
        rate, of_what = run.speed
        after = f"after {plural(run.epochs or 0, 'epoch')}"
        if run.perplexity is not None:
            after += f", perplexity {run.perplexity:.2f}"
        if run.top5 is not None and measure.key == "accuracy":
            after += f", top-5 {measure.cell(run.top5)}"
        tiles = [
            (measure.name, measure.cell(best.median), after),
            ("time", duration(run.seconds), f"{duration(fastest)} to {goal}" if fastest is not None else ""),
            (
                "batch",
                run.batches,
                f"{plural(run.workers, 'worker')}, {plural(run.ranks, 'rank')}{_noise(run.noise_scale)}",
            ),
            ("speed", f"{count(rate)} {of_what}/s", run.hardware),
        ]
    else:
        times = [
            (s, g.label)
            for g in study.groups
            if study.target is not None and (s := g.seconds_to(study.target)) is not None
        ]
        quick = min(times, default=None)
        level, unsure = len(study.peers("alike")), len(study.unsure)
        tiles = [
            (f"best median {measure.name}", measure.cell(best.median), best.label),
            ("level with it", count(level), "groups that cannot be told apart from it")
            if level or not unsure
            else ("level with it", "?", f"{plural(unsure, 'group')} with too few seeds to say"),
            (f"first to {goal}", duration(quick[0]) if quick else "–", quick[1] if quick else "no group reached it"),
            ("runs", count(len(study.outcomes)), plural(len(study.groups), "group")),
        ]
    return [{"name": name, "value": value, "detail": detail} for name, value, detail in tiles]
