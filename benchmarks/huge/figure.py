"""The figure of the ablation: points that a system loses without a technique, as SVG without any package.

PYTHONPATH=src python benchmarks/huge/figure.py [--out docs/figures/techniques.svg]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from book import Book
from embedded import BATCHES, lost_without

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COLORS = {1024: "#8356c9", 128: "#c9b3ea"}
WIDTH, LEFT, RIGHT, TOP, ROW, BAR, GAP = 820, 250, 40, 64, 40, 13, 26
LEAST, MOST = -10, 20


def draw(book: Book) -> str:
    """Return the figure: two bars a technique, the huge batch first; whiskers span the seeds."""
    rows = [(recipe, lost_without(book, recipe)) for recipe in ("leap", "sony")]
    count = sum(len(techniques) for _, techniques in rows)
    height = TOP + count * ROW + GAP * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="14"><rect width="100%" height="100%" fill="#fff"/>',
        _text(LEFT, 20, "points of accuracy lost without a technique, embedded images, three seeds", "start", "#222"),
    ]
    for number, batch in enumerate(BATCHES):
        x = LEFT + 230 * number
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{COLORS[batch]}"/>')
        parts.append(_text(x + 18, 45, f"largest batch {batch:,}", "start"))
    for points in range(LEAST, MOST + 1, 5):
        color = "#888" if points == 0 else "#e4e4e0"
        parts.append(f'<line x1="{_x(points)}" y1="{TOP}" x2="{_x(points)}" y2="{height - 26}" stroke="{color}"/>')
        parts.append(_text(_x(points), height - 8, f"{points:g}", "middle"))
    y = float(TOP)
    for recipe, techniques in rows:
        parts.append(_text(20, y + 18, recipe, "start", "#222"))
        y += GAP
        for technique, by_batch in techniques.items():
            parts.append(_text(LEFT - 12, y + 18, technique, "end"))
            for number, batch in enumerate(BATCHES):
                parts += _bar(by_batch.get(batch, []), y + number * (BAR + 1), COLORS[batch])
            y += ROW
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(lost: list[float], y: float, color: str) -> list[str]:
    if not lost:
        return []
    points = [100 * value for value in lost]
    begin, end = sorted((_x(0), _x(statistics.mean(points))))
    middle = y + BAR / 2
    whisker = f'x1="{_x(min(points)):.1f}" y1="{middle}" x2="{_x(max(points)):.1f}" y2="{middle}"'
    return [
        f'<rect x="{begin:.1f}" y="{y}" width="{max(1.0, end - begin):.1f}" height="{BAR}" fill="{color}"/>',
        f'<line {whisker} stroke="#333" stroke-width="1.5"/>',
    ]


def _x(points: float) -> float:
    return LEFT + (points - LEAST) / (MOST - LEAST) * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, text: str, anchor: str, color: str = "#555") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{text}</text>'


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "techniques.svg")
    parser.parse_args().out.write_text(draw(Book(HERE / "results" / "embedded.jsonl")))


if __name__ == "__main__":
    main()
