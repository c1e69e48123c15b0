"""The figure of the methods: bits per byte against the bytes that a rank has sent, as SVG without any package.

    python benchmarks/islands/figure.py [--out docs/figures/bytes.svg]

Reads what `links.py` has written: every method on the embedded text, evaluated every ten steps, the same samples.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLORS = {
    "DDP": "#6b7785", "torus, fp16": "#2f7fd6", "1-bit": "#1792a4", "averaging": "#0b7d63", "DiLoCo": "#d4466b",
    "DiLoCo, momentum 0.5": "#8356c9", "streaming": "#d9622b",
}  # fmt: skip
NAMES = {
    "DDP": "DDP, float32, every step", "torus, fp16": "torus in fp16, every step", "1-bit": "1-bit, every step",
    "averaging": "local SGD, H = 10", "DiLoCo": "DiLoCo, 0.9", "DiLoCo, momentum 0.5": "DiLoCo, outer momentum 0.5",
    "streaming": "streaming, 4 bits",
}  # fmt: skip
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 440, 62, 30, 26, 54
TICKS_MB = (0.1, 0.3, 1, 3, 10, 30, 100)
BITS = (3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5)


def draw(results: dict[str, Any]) -> str:
    """Return the figure: a line for each method, named where it ends."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="14"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for bits in BITS:
        parts.append(_line(LEFT, _y(bits), WIDTH - RIGHT, _y(bits), "#e4e4e0"))
        parts.append(_text(LEFT - 8, _y(bits) + 5, f"{bits:g}", "end"))
    for megabytes in TICKS_MB:
        parts.append(_line(_x(megabytes), TOP, _x(megabytes), HEIGHT - BOTTOM, "#e4e4e0"))
        parts.append(_text(_x(megabytes), HEIGHT - BOTTOM + 20, f"{megabytes:g} MB", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "sent by a rank so far, log scale", "middle"))
    parts.append(_text(8, 16, "bits per byte on held-out text", "start"))
    sent = next(iter(results["rates"].values()))
    for method, color in COLORS.items():
        curve = results["paths"]["curves"][method]
        each = sent[method]["bytes"] / 1e6
        points = [(_x(step * each), _y(bits)) for step, bits in curve]
        shown = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{shown}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points]
        parts.append(_label(method, points, color))
    return "\n".join([*parts, "</svg>"]) + "\n"


LABELS = {
    "DDP": (1, 12, 5, "start"), "torus, fp16": (0, -10, 4, "end"), "1-bit": (-1, 6, -10, "start"),
    "averaging": (-1, 10, 4, "start"), "DiLoCo": (-1, 4, 20, "end"), "DiLoCo, momentum 0.5": (-1, 10, 20, "start"),
    "streaming": (-1, 0, 20, "middle"),
}  # fmt: skip
"""Where a name stands: at which point of its line, so far to the right and down, and its anchor."""


def _label(method: str, points: list[tuple[float, float]], color: str) -> str:
    index, right, down, anchor = LABELS[method]
    x, y = points[index]
    return _text(x + right, y + down, NAMES[method], anchor, color)


def _x(megabytes: float) -> float:
    share = math.log(megabytes / TICKS_MB[0]) / math.log(TICKS_MB[-1] / TICKS_MB[0])
    return LEFT + 10 + share * (WIDTH - LEFT - RIGHT - 20)


def _y(bits: float) -> float:
    share = (bits - BITS[0]) / (BITS[-1] + 0.2 - BITS[0])
    return HEIGHT - BOTTOM - 10 - share * (HEIGHT - TOP - BOTTOM - 10)


def _line(x0: float, y0: float, x1: float, y1: float, color: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, anchor: str, color: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{text}</text>'


def main() -> None:
    """Draw what was measured last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "links.json")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "docs" / "figures" / "bytes.svg")
    options = parser.parse_args()
    options.out.write_text(draw(json.loads(options.results.read_text())))


if __name__ == "__main__":
    main()
