"""Progress over a whole suite: the current run, how far it is, and how long the rest will take."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from bigstep.bench.folders import State, wall_seconds
from bigstep.bench.planned import Planned
from bigstep.engine.observers.progress import clock
from bigstep.records import read_run

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

__all__ = ["Watch"]

_TAIL = 4_096
"""Bytes from the end of metrics.jsonl that hold at least one whole row."""


class Watch:
    """Shows a suite: a live line on a terminal, a line for each finished run elsewhere.

    Args:
        title: The name of the suite.
        stream: Where lines go; by default standard error.
        live: Redraw one line in place; None asks the stream whether it is a terminal.
    """

    def __init__(self, title: str, stream: TextIO | None = None, live: bool | None = None):
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb" if live is None else live
        self._live: Live | None = None
        self._total = self._done = 0
        self._waiting: list[Planned] = []
        self._walls: dict[str, list[float]] = {}
        self._current: tuple[Planned, Path, float] | None = None

    def __enter__(self) -> Watch:
        if self._is_live:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, force_terminal=True, highlight=False, markup=False)
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def plan(self, runs: Sequence[Planned], states: Sequence[State], root: Path) -> None:
        """Take the whole list of runs, and the wall times of the finished ones."""
        self._total = len(runs)
        for run, state in zip(runs, states, strict=True):
            if state in ("finished", "failed"):
                self._done += 1
                if (wall_s := wall_seconds(root / run.name)) is not None:
                    self._walls.setdefault(_kind(run), []).append(wall_s)
            else:
                self._waiting.append(run)
        there = f", {self._done} of them already finished" if self._done else ""
        self._say(f"{self._title}: {self._total} run{'' if self._total == 1 else 's'}{there}, in {root}")

    def begin(self, run: Planned, folder: Path) -> None:
        """Note that a run starts."""
        self._waiting.remove(run)
        self._current = (run, folder, time.monotonic())
        self.look()

    def look(self) -> None:
        """Redraw, if the line is live; cheap enough to call a few times a second."""
        if self._live:
            self._live.update(self._line(self._live.console.width - 1), refresh=True)

    def end(self, run: Planned, folder: Path, wall_s: float, failure: str | None) -> None:
        """Note that a run ended, successfully or not."""
        self._done += 1
        self._current = None
        if failure is None:
            self._walls.setdefault(_kind(run), []).append(wall_s)
            result = read_run(folder).result
            accuracy, bits = result.get("accuracy"), result.get("bits_per_byte")
            reached = "–" if accuracy is None else f"{100 * accuracy:.2f} %"
            if bits is not None:
                reached = f"{bits:.3f} bits per byte"
            outcome = f"{reached} in {clock(result.get('seconds') or 0.0)}"
        else:
            outcome = f"FAILED: {failure}"
        self._say(f"[{self._done:>{len(str(self._total))}}/{self._total}] {run.name}: {outcome}{self._left()}")
        self.look()

    def _say(self, text: str) -> None:
        if self._live:
            self._live.console.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def _left(self) -> str:
        seconds = self.seconds_left()
        return "" if seconds is None else f"  ·  {clock(seconds)} left"

    def seconds_left(self) -> float | None:
        """Estimate the time left from finished runs of the same kind; None before any has finished."""
        known = [wall_s for walls in self._walls.values() for wall_s in walls]
        if not known:
            return None
        usual = statistics.fmean(known)

        def expected(run: Planned) -> float:
            return statistics.fmean(self._walls.get(_kind(run), [usual]))

        left = sum(map(expected, self._waiting))
        if self._current is not None:
            run, _, started = self._current
            left += max(0.0, expected(run) - (time.monotonic() - started))
        return left

    def _line(self, room: int) -> Text:
        from rich.text import Text

        line = Text(no_wrap=True, overflow="crop", end="")
        bar = min(24, max(8, room // 5))
        filled = round(bar * self._done / max(1, self._total))
        line.append(f"{self._title} ", style="bold")
        line.append("━" * filled, style="green")
        line.append("━" * (bar - filled), style="dim")
        line.append(f" {self._done}/{self._total}{self._left()}")
        if self._current is not None:
            run, folder, _ = self._current
            row = _last_row(folder / "metrics.jsonl")
            line.append(f"  {run.label} (seed {run.seed})", style="bold")
            if row.get("epoch") is not None:
                line.append(f"  epoch {row['epoch']:.1f}/{run.config().epochs:g}")
        line.truncate(room)
        return line


def _kind(run: Planned) -> str:
    """The key of runs that should take equally long: all seeds of one setting."""
    return f"{run.label} {run.variant}"


def _last_row(path: Path) -> Mapping[str, Any]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().splitlines()
        row = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):  # no file yet, or its last row is incomplete
        return {}
    return row if isinstance(row, dict) else {}
