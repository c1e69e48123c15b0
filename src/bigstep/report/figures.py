"""What all charts share: the palette, an empty figure in the page's style, and `Chart`, a figure with its text.

Colours of text, grid and background are left to the page, which sets them for light mode, dark mode and print.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["DRAWN", "PALETTE", "Chart", "cut", "figure", "safe", "style_of"]

PALETTE = (
    "#2f7ed8", "#d9632b", "#2a9163", "#c9438f", "#8a63d2", "#a07c00", "#1490a5", "#d14b4b", "#6a8f1f", "#6f7f8f",
)  # fmt: skip
"""Colours with a contrast of at least 3 : 1 on the page's light and on its dark background."""
DASHES = ("solid", "dash", "dot")
DRAWN = len(PALETTE) * len(DASHES)
LEGEND = {"traceorder": "normal", "orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"}
"""The legend stands above its chart."""


@dataclass(frozen=True)
class Chart:
    """A figure with its heading, and its message in words for readers who cannot see it."""

    key: str
    title: str
    caption: str
    figure: dict[str, Any]
    wide: bool = False


def figure(x: str, y: str, **layout: Any) -> Figure:
    """Make an empty figure with named axes in the style of the page."""
    from plotly.graph_objects import Figure

    base: dict[str, Any] = {
        "template": {},
        "margin": {"l": 8, "r": 14, "t": 12, "b": 8},
        "showlegend": False,
        "hovermode": "closest",
        "height": 340,
        "xaxis": {"title": {"text": x, "standoff": 8}, "automargin": True, "zeroline": False},
        "yaxis": {"title": {"text": y, "standoff": 8}, "automargin": True, "zeroline": False},
    }
    made = Figure(layout=base)
    made.update_layout(**layout)
    return made


def safe(text: str) -> str:
    """Escape a name from a record: plotly reads some HTML tags in its labels."""
    return html.escape(text, quote=False)


def style_of(index: int) -> tuple[str, str]:
    """Return colour and dash of the group at this position."""
    return PALETTE[index % len(PALETTE)], DASHES[index // len(PALETTE) % len(DASHES)]


def cut(label: str, limit: int = 26) -> str:
    """Shorten a label so that it leaves room for the chart, on a phone too."""
    return label if len(label) <= limit else label[: limit - 1] + "…"
