"""The result of a check: a row for each property, as a table, as JSON, as an exit status."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Report", "Row", "Status"]

Status = Literal["pass", "fail", "not applicable", "not run"]

WIDE = 110
"""Width of a terminal, in columns, from which the table says what each figure is."""
_MARKS = {"pass": "pass", "fail": "FAIL", "not applicable": "n/a", "not run": "not run"}
_STYLES = {"pass": "green", "fail": "bold red", "not applicable": "dim", "not run": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One property: what was measured, what it had to be, and what to do about it."""

    name: str
    """The property."""
    status: Status
    """not applicable gives the reason in `words`; not run names the failed row that it depends on."""
    figure: float | None = None
    """What was measured."""
    bound: float | None = None
    """The most it may be."""
    measure: str = ""
    """What the figure counts."""
    words: str = ""
    """What was seen, and what the figure leaves out."""
    remedy: str = ""
    """What to change; only where the row fails."""
    seconds: float = 0.0
    """Time it took."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows of a check."""

    title: str
    """What was checked."""
    ranks: tuple[int, ...]
    """Sizes of the worlds."""
    rows: tuple[Row, ...]
    """In the order in which one builds on another: the first that fails is the cause, later ones may follow from it."""
    seconds: float
    """Total time."""

    @property
    def passed(self) -> bool:
        """Whether no row failed."""
        return not any(row.status == "fail" for row in self.rows)

    @property
    def cause(self) -> Row | None:
        """The first row that failed."""
        return next((row for row in self.rows if row.status == "fail"), None)

    def row(self, name: str) -> Row:
        """The row of a property."""
        return next(row for row in self.rows if row.name == name)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them; JSON has no infinity, so an infinite figure is null."""
        facts = {"passed": self.passed, **asdict(self)}
        for row in facts["rows"]:
            if row["figure"] is not None and not math.isfinite(row["figure"]):
                row["figure"] = None
        return facts

    def summary(self) -> str:
        """One sentence."""
        count = {status: sum(row.status == status for row in self.rows) for status in _MARKS}
        world = "1 rank" if self.ranks == (1,) else f"{_listed(self.ranks)} ranks"
        cause = self.cause
        verdict = f"all {count['pass']} properties that apply hold" if cause is None else f"{cause.name!r} fails"
        rest = [f"{count[s]} {_MARKS[s]}" for s in ("not applicable", "not run") if count[s]]
        others = f" ({', '.join(rest)})" if rest else ""
        return f"{self.title} on {world}: {verdict}{others}, {self.seconds:.0f} s."

    def print(self) -> None:
        """Show the table on standard output."""
        from rich.console import Console
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        console = Console(highlight=False, markup=False)
        wide = console.width >= WIDE
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading, side in (("", "left"), ("property", "left"), ("figure", "right"), ("bound", "right")):
            table.add_column(heading, justify="right" if side == "right" else "left", no_wrap=True)
        if wide:
            table.add_column("what the figure is")
        for row in self.rows:
            mark = Text(_MARKS[row.status], style=_STYLES[row.status])
            measure = [Text(row.measure, style="dim")] if wide else []
            table.add_row(mark, row.name, _number(row.figure), _number(row.bound), *measure)
        console.print(table)
        for failed in (True, False):
            for row in self.rows:
                if not row.words or (row.status == "fail") != failed:
                    continue
                said = Text.assemble((f"{row.name}: ", "bold"), row.words)
                if row.remedy:
                    said.append(f"\nWhat to change: {row.remedy}", style="bold")
                console.print(Padding(said, (1 if failed else 0, 0, 0, 2)), style="red" if failed else "dim")
            console.print()
        console.print(self.summary())


def _listed(numbers: tuple[int, ...]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
