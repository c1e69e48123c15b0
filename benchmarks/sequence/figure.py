"""The figure of rules by batch: bits per byte of each rule as the batch grows, a panel a network, as SVG.

    python figure.py "GPT, 10 M, books=results/books.jsonl" "GPT, 0.12 M=results/small_gpt.jsonl" \\
        "LSTM, 0.10 M=results/small_lstm.jsonl"

Reads the books that `small.py` and `books.py` have written. A point is the median over seeds, its line their range.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

COLORS = {
    "sgd": ("SGD", "#6b7785"), "lars": ("LARS", "#d9622b"), "adamw": ("AdamW", "#2f7fd6"), "lamb": ("LAMB", "#0b7d63"),
    "adamw-1bit": ("AdamW, 1-bit", "#d4466b"),
}  # fmt: skip
PANEL, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 380, 52, 112, 40, 52

Curves = dict[str, dict[int, list[float]]]


def curves_of(book: Path) -> Curves:
    """Return bits per byte by rule and batch, one figure a seed."""
    found: Curves = {}
    for line in book.read_text().splitlines():
        row = json.loads(line)
        if row["name"].startswith("batch ") and row.get("bits_per_byte") is not None:
            _, rule, batch = row["name"].split()
            found.setdefault(rule, {}).setdefault(int(batch), []).append(row["bits_per_byte"])
    return found


def draw(panels: dict[str, Curves]) -> str:
    """Return the figure; panels share their bits, each has batches of its own. A seed far beyond is cut off."""
    medians = [statistics.median(bits) for curves in panels.values() for by in curves.values() for bits in by.values()]
    low, high = math.floor(2 * min(medians)) / 2, math.ceil(2 * max(medians)) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PANEL * len(panels)} {HEIGHT}" '
        'font-family="sans-serif" font-size="14"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for number, (title, curves) in enumerate(panels.items()):
        batches = sorted({batch for by in curves.values() for batch in by})
        parts += _panel(title, curves, number * PANEL, batches, (low, high))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, curves: Curves, shift: float, batches: list[int], span: tuple[float, float]) -> list[str]:
    low, high = span

    def x(batch: float) -> float:
        return shift + LEFT + (PANEL - LEFT - RIGHT) * math.log(batch / batches[0]) / math.log(batches[-1] / batches[0])

    def y(bits: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - min(bits, high)) / (high - low)

    parts = [_text(shift + LEFT, 22, f"{title}: bits per byte", "start")]
    for half in range(round(2 * low), round(2 * high) + 1):
        parts.append(_line(x(batches[0]), y(half / 2), x(batches[-1]), y(half / 2), "#e4e4e0"))
        parts.append(_text(shift + LEFT - 8, y(half / 2) + 5, f"{half / 2:g}", "end"))
    for batch in batches:
        parts.append(_line(x(batch), TOP, x(batch), HEIGHT - BOTTOM, "#e4e4e0"))
        parts.append(_text(x(batch), HEIGHT - BOTTOM + 20, f"{batch:,}", "middle"))
    parts.append(_text((x(batches[0]) + x(batches[-1])) / 2, HEIGHT - 10, "sequences a step, equal tokens", "middle"))
    ends: list[tuple[float, str, str]] = []
    for rule, (name, color) in COLORS.items():
        medians = {batch: statistics.median(bits) for batch, bits in sorted(curves.get(rule, {}).items())}
        if not medians:
            continue
        shown = " ".join(f"{x(batch):.1f},{y(bits):.1f}" for batch, bits in medians.items())
        parts.append(f'<polyline points="{shown}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        for batch, bits in medians.items():
            each = curves[rule][batch]
            parts.append(f'<circle cx="{x(batch):.1f}" cy="{y(bits):.1f}" r="3.5" fill="{color}"/>')
            parts.append(_line(x(batch), y(min(each)), x(batch), y(max(each)), color))
        ends.append((y(list(medians.values())[-1]), name, color))
    place = -math.inf
    for height, name, color in sorted(ends):
        place = max(height, place + 17)  # names do not lie on one another
        parts.append(_text(x(batches[-1]) + 9, place + 5, name, "start", color))
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, words: str, anchor: str, color: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("books", nargs="+", metavar="TITLE=BOOK")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[2] / "docs" / "figures" / "rules-by-batch.svg"
    )
    options = parser.parse_args()
    pairs = [given.partition("=") for given in options.books]
    options.out.write_text(draw({title: curves_of(Path(book)) for title, _, book in pairs}))


if __name__ == "__main__":
    main()
