"""Small line charts in Unicode braille for terminals: each character holds 2 x 4 dots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["draw"]

COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red")
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def draw(
    title: str,
    lines: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    *,
    width: int,
    height: int = 9,
    write: Callable[[float], str] = "{:.3g}".format,
) -> Text:
    """Draw named lines into one chart of `width` columns; `write` labels the vertical axis.

    >>> print(draw("y", [("a", [0, 1, 2], [0.0, 1.0, 0.5])], width=16, height=2).plain)
    y
    1 ┤   ⣀⠤⠒⠉⠑⠒⠢⠤⢄⣀
    0 ┤⡠⠔⠊
       0     epoch 2
    """
    from rich.text import Text

    points = [(x, y) for _, xs, ys in lines for x, y in zip(xs, ys, strict=True)]
    chart = Text(no_wrap=True, overflow="crop")
    chart.append(title, style="bold")
    if not points:
        return chart.append("\n  nothing recorded", style="dim")
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [write(high), write(low)]
    margin = max(map(len, labels))
    columns = max(8, width - margin - 2)
    dots = [[0] * columns for _ in range(height)]
    owner = [[0] * columns for _ in range(height)]
    for index, (_, xs, ys) in enumerate(lines):
        for across, up in _path(xs, ys, (left, right), (low, high), (2 * columns - 1, 4 * height - 1)):
            row, column = height - 1 - up // 4, across // 2
            dots[row][column] |= DOTS[3 - up % 4][across % 2]
            owner[row][column] = index
    for row in range(height):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 else ""
        chart.append(f"\n{label:>{margin}} ┤" if label else f"\n{'':>{margin}} │", style="dim")
        filled = max((column + 1 for column in range(columns) if dots[row][column]), default=0)
        for column in range(filled):
            mark = chr(0x2800 + dots[row][column]) if dots[row][column] else " "
            chart.append(mark, style=COLORS[owner[row][column] % len(COLORS)])
    foot = f"epoch {right:.3g}"
    begin = "0" if 0 < left < right / 50 else f"{left:.3g}"  # the first step ends slightly after epoch 0
    chart.append(f"\n{'':>{margin}}  {begin:<{max(1, columns - len(foot))}}{foot}", style="dim")
    used = width
    for index, (name, _, _) in enumerate(lines if len(lines) > 1 else ()):
        entry = f"● {name}  "
        if used + len(entry) > width:
            chart.append("\n" + " " * (margin + 2))
            used = margin + 2
        chart.append(entry, style=COLORS[index % len(COLORS)])
        used += len(entry)
    return chart


def _path(
    xs: Sequence[float],
    ys: Sequence[float],
    across: tuple[float, float],
    up: tuple[float, float],
    size: tuple[int, int],
) -> list[tuple[int, int]]:
    """The dots of a line, joined without gaps."""

    def place(value: float, span: tuple[float, float], steps: int) -> int:
        return round((value - span[0]) / (span[1] - span[0]) * steps) if span[1] > span[0] else 0

    corners = [(place(x, across, size[0]), place(y, up, size[1])) for x, y in zip(xs, ys, strict=True)]
    found = corners[:1]
    for (x0, y0), (x1, y1) in zip(corners, corners[1:], strict=False):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        found += [(x0 + round((x1 - x0) * k / steps), y0 + round((y1 - y0) * k / steps)) for k in range(1, steps + 1)]
    return found
