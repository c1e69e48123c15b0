"""The figure of the table: test accuracy against the batch, as SVG without any package.

The error has a logarithmic scale, so that half a point at 94 % is as visible as five at 40 %.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

COLORS = {"leap": "#111111", "muon": "#c98a00",
          "sony": "#8356c9", "lars": "#0b7d63", "fujitsu": "#d9622b", "plain": "#2f7fd6",
          "google": "#d4466b", "fastai": "#a17c00", "fair": "#5d8a1f", "pfn": "#6b7785",
          "onebit": "#1792a4"}  # fmt: skip
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 480, 60, 110, 24, 50
LOWEST, HIGHEST = 45.0, 95.0
SHOWN = (50, 60, 70, 80, 85, 90, 92, 94, 95)
TICKS = (512, 2048, 8192, 16384, 25000)
LABEL = 17
"""Pixels from one name to the next."""


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a line for each system with at least three batches; whiskers span its seeds."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="14"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for accuracy in SHOWN:
        parts.append(_line(LEFT, _y(accuracy), WIDTH - RIGHT, _y(accuracy), "#e4e4e0"))
        parts.append(_text(LEFT - 8, _y(accuracy) + 5, f"{accuracy}", "end"))
    for batch in TICKS:
        parts.append(_line(_x(batch), TOP, _x(batch), HEIGHT - BOTTOM, "#e4e4e0"))
        parts.append(_text(_x(batch), HEIGHT - BOTTOM + 20, f"{batch:,}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "batch (the largest of a run), log scale", "middle"))
    parts.append(_text(LEFT - 8, 14, "test %", "end"))
    names: list[tuple[float, str, str]] = []
    for recipe, color in COLORS.items():
        found = {batch: _accuracies(rows, recipe, batch) for batch in TICKS}
        points = [(_x(batch), values) for batch, values in found.items() if values]
        if len(points) < 3:
            continue
        centre = [(x, _y(statistics.mean(values))) for x, values in points]
        path_text = " ".join(f"{x:.1f},{y:.1f}" for x, y in centre)
        parts.append(f'<polyline points="{path_text}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        for (x, values), (_, y) in zip(points, centre, strict=True):
            parts.append(_line(x, _y(min(values)), x, _y(max(values)), color, 2))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
        names.append((centre[-1][1], recipe, color))
    for y, recipe, color in _apart(sorted(names)):
        parts.append(_text(_x(TICKS[-1]) + 12, y + 5, recipe, "start", color))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _apart(names: list[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Names by height, moved up where they would cover one another."""
    heights = [y for y, _, _ in names]
    for index in range(len(heights) - 2, -1, -1):
        heights[index] = min(heights[index], heights[index + 1] - LABEL)
    return [(height, recipe, color) for height, (_, recipe, color) in zip(heights, names, strict=True)]


def _accuracies(rows: list[dict[str, Any]], recipe: str, batch: int) -> list[float]:
    """Of the finished search where it was run, else of the first table."""
    for part in ("converged", "table"):
        prefix = f"{part} {recipe} {batch} "
        found = [100 * (row["accuracy"] or 0.0) for row in rows if row["name"].startswith(prefix)]
        if found:
            return found
    return []


def _x(batch: float) -> float:
    share = math.log(batch / TICKS[0]) / math.log(TICKS[-1] / TICKS[0])
    return LEFT + 20 + share * (WIDTH - LEFT - RIGHT - 40)


def _y(accuracy: float) -> float:
    share = math.log((100 - LOWEST) / (100 - max(accuracy, LOWEST))) / math.log((100 - LOWEST) / (100 - HIGHEST))
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _line(x0: float, y0: float, x1: float, y1: float, color: str, width: float = 1) -> str:
    ends = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, color: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{text}</text>'
