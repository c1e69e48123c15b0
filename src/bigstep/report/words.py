"""Numbers as people read them, the same in terminal, page and tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["clean", "count", "duration", "listing", "number", "percent", "plural", "points", "size"]


BEYOND = 1e100
"""No real figure of a run is this large; sums and products of smaller ones stay finite."""


def number(value: object) -> float | None:
    """Take a finite number from a record, or None: records may hold null, text or nothing.

    >>> number(3), number(None), number("3"), number(float("nan"))
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        finite = float(value)
    except OverflowError:
        return None
    return finite if abs(finite) < BEYOND else None


def clean(text: object, limit: int = 400) -> str:
    r"""Make text from a record safe to print: no control characters, limited length.

    >>> clean("a\x1b[31mb\n")
    'a [31mb'
    """
    plain = "".join(letter if letter.isprintable() else " " for letter in str(text)[: limit + 1]).strip()
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def percent(fraction: float | None) -> str:
    """Write a fraction as a percentage.

    >>> percent(0.8835), percent(None)
    ('88.35 %', '–')
    """
    return "–" if fraction is None else f"{100 * fraction:.2f} %"


def points(difference: float) -> str:
    """Write a difference of two fractions in percentage points.

    >>> points(0.0123)
    '1.23 points'
    """
    return f"{100 * difference:.2f} points"


def count(value: float | None) -> str:
    """Write a whole number with thousands separators.

    >>> count(32_768), count(None)
    ('32,768', '–')
    """
    return "–" if value is None else f"{value:,.0f}"


def plural(number_of: float | None, noun: str) -> str:
    """Write a count with its noun.

    >>> plural(1, "rank"), plural(2_048, "worker"), plural(0.5, "epoch")
    ('1 rank', '2,048 workers', '0.5 epochs')
    """
    written = count(number_of) if number_of is None or number_of == int(number_of) else f"{number_of:g}"
    return f"{written} {noun}{'' if number_of == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Write a time span in the units people use for it.

    >>> [duration(s) for s in (0.25, 7.25, 92, 3_700, 300_000)]
    ['0.25 s', '7.2 s', '1 min 32 s', '1 h 01 min', '3 d 11 h']
    """
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"


def size(number_of_bytes: float | None) -> str:
    """Write bytes in decimal units.

    >>> size(3_200_000), size(None)
    ('3.2 MB', '–')
    """
    if number_of_bytes is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(number_of_bytes) < 1_000 or unit == "TB":
            return f"{number_of_bytes:.0f} B" if unit == "B" else f"{number_of_bytes:.1f} {unit}"
        number_of_bytes /= 1_000
    raise AssertionError("the last unit takes every size")


def listing(names: Sequence[str], limit: int = 6) -> str:
    """Join names as a sentence does; long lists end in a count.

    >>> listing(["fair"]), listing(["fair", "pfn", "sony"]), listing(list("abcd"), limit=2)
    ('fair', 'fair, pfn and sony', 'a, b and 2 more')
    """
    if len(names) > limit:
        return f"{', '.join(names[:limit])} and {count(len(names) - limit)} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else list(names))
