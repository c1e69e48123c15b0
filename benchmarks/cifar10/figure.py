"""The figure of the table: test accuracy against the batch, as SVG without any package."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

COLORS = {"sony": "#8356c9", "lars": "#0b7d63", "fujitsu": "#d9622b", "plain": "#2f7fd6", "google": "#d4466b",
          "fastai": "#a17c00", "fair": "#5d8a1f", "pfn": "#6b7785", "onebit": "#1792a4"}  # fmt: skip
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 420, 60, 110, 20, 50
LOWEST, HIGHEST = 70.0, 96.0
TICKS = (512, 2048, 8192, 16384, 25000)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a line for each system with at least three batches; whiskers span its seeds."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="14"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for accuracy in range(70, 97, 5):
        parts.append(_line(LEFT, _y(accuracy), WIDTH - RIGHT, _y(accuracy), "#e4e4e0"))
        parts.append(_text(LEFT - 8, _y(accuracy) + 5, f"{accuracy}", "end"))
    for batch in TICKS:
        parts.append(_line(_x(batch), TOP, _x(batch), HEIGHT - BOTTOM, "#e4e4e0"))
        parts.append(_text(_x(batch), HEIGHT - BOTTOM + 20, f"{batch:,}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "batch, log scale", "middle"))
    parts.append(_text(LEFT - 8, 14, "test %", "end"))
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
        parts.append(_text(centre[-1][0] + 10, centre[-1][1] + 5, recipe, "start", color))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _accuracies(rows: list[dict[str, Any]], recipe: str, batch: int) -> list[float]:
    prefix = f"table {recipe} {batch} "
    return [100 * (row["accuracy"] or 0.0) for row in rows if row["name"].startswith(prefix)]


def _x(batch: float) -> float:
    share = math.log(batch / TICKS[0]) / math.log(TICKS[-1] / TICKS[0])
    return LEFT + 20 + share * (WIDTH - LEFT - RIGHT - 40)


def _y(accuracy: float) -> float:
    share = (max(accuracy, LOWEST) - LOWEST) / (HIGHEST - LOWEST)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _line(x0: float, y0: float, x1: float, y1: float, color: str, width: float = 1) -> str:
    ends = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, color: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{text}</text>'
