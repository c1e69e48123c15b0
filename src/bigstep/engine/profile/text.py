"""A profile in words and tables: Markdown for the run folder, which a terminal shows as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["profile_markdown"]

_COLUMNS = ("us a step", "share", "calls", "GFLOP", "MB", "TFLOP/s", "GB/s", "bound us", "of bound")
_MOST_LETTERS = 64


def profile_markdown(profile: Mapping[str, Any], most_rows: int | None = None) -> str:
    """Write a profile, as `Table.to_mapping` gives it, as Markdown whose columns line up in plain text too.

    Args:
        profile: the table as plain values.
        most_rows: how many operations to list; all unless given.
    """
    peaks = profile["peaks"]
    rows = profile["rows"] if most_rows is None else profile["rows"][:most_rows]
    left = len(profile["rows"]) - len(rows)
    lines = [
        f"# Where a step of {profile['step_us']:,.0f} us goes",
        "",
        f"Mean of {profile['steps']} profiled step{'s' if profile['steps'] > 1 else ''} on {profile['where']}. "
        f"Measured here: a copy moves {peaks['bytes_per_s'] / 1e9:,.1f} GB/s (read and written), a matrix product in "
        f"{peaks['dtype']} does {peaks['flops_per_s'] / 1e12:,.3g} TFLOP/s.",
        "The bound is the larger of bytes over bandwidth and FLOPs over rate, with inputs and outputs counted once; "
        "what a cache keeps can beat it. The profiler itself lengthens short operations.",
        "",
        *_table("part", profile["groups"]),
        "",
        *_table("operation or kernel", rows),
    ]
    if left:
        lines += ["", f"… and {left} more, smaller ones."]
    return "\n".join(lines) + "\n"


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [[title, *_COLUMNS], *([_shortened(row["name"]), *_figures(row)] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    aligned = [
        "| " + " | ".join(_pad(text, width, n) for n, (text, width) in enumerate(zip(line, widths, strict=True))) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if n == 0 else ":") for n, width in enumerate(widths)) + "|"
    return [aligned[0], rule, *aligned[1:]]


def _pad(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column == 0 else text.rjust(width)


def _shortened(name: str) -> str:
    plain = name.replace("|", "/").replace("\n", " ")
    return plain if len(plain) <= _MOST_LETTERS else plain[: _MOST_LETTERS - 1] + "…"


def _figures(row: Mapping[str, Any]) -> list[str]:
    moved = row["bytes"]
    known = bool(moved) and row["bound_us"] is not None
    return [
        f"{row['us']:,.1f}",
        f"{100 * row['share']:.1f} %",
        f"{row['calls']:,.4g}" if row["calls"] else "",
        f"{row['flops'] / 1e9:,.3g}" if row["flops"] else "",
        f"{moved / 1e6:,.3g}" if known else "",
        f"{row['tflops']:,.3g}" if known and row["flops"] else "",
        f"{row['gb_per_s']:,.4g}" if known else "",
        f"{row['bound_us']:,.1f}" if known else "",
        f"{100 * row['reached']:.0f} %" if known and row["reached"] is not None else "",
    ]
