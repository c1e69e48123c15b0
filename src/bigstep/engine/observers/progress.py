"""What a person sees while a run goes on: one live line on a terminal, sparse plain lines elsewhere.

A call costs a few additions unless a redraw is due, so it can stand inside the training loop.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from bigstep.engine.observers.base import Observer
from bigstep.records import median_of_last_epochs

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

__all__ = ["Progress", "clock"]

REDRAW_S = 0.1
PLAIN_S = 10.0
PARTS = {"compute_s": "compute", "exchange_s": "exchange", "data_s": "data"}


def clock(seconds: float) -> str:
    """Write a duration as people read it from a clock.

    >>> clock(7), clock(83), clock(3_723), clock(200_000)
    ('0:07', '1:23', '1:02:03', '2 d 7 h')
    """
    whole = max(0, round(seconds))
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"
    hours, minutes = whole // 3_600, whole % 3_600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class Progress(Observer):
    """Shows a run: bar, epoch, images/s, loss, accuracy, time left, and where the time goes.

    Args:
        title: What is being trained, in a word or two.
        epochs: Where the run ends.
        steps: Where it ends sooner, if it does.
        stream: Where lines go; by default standard error, so that standard output stays free for results.
        live: One line that is redrawn in place; None asks the stream whether it is a terminal.

    >>> shown = Progress("plain", epochs=2, stream=sys.stdout, live=False)
    >>> shown.row({"epoch": 1.0, "seconds": 30, "loss": 0.5, "images_per_s": 400, "compute_s": 0.9, "data_s": 0.1})
    >>> shown.evaluated({"epoch": 1.0, "seconds": 30.0, "accuracy": 0.871, "eval_loss": 0.4})
    plain  epoch 1.00/2  accuracy 87.1 %  loss 0.5000  400 images/s  0:30 gone  compute 90 % exchange 0 % data 10 %
    """

    def __init__(
        self,
        title: str,
        epochs: float,
        stream: TextIO | None = None,
        live: bool | None = None,
        *,
        steps: int | None = None,
        unit: str = "images",
    ):
        self._title = _printable(title)
        self._epochs, self._steps, self._unit = epochs, steps, unit
        self._stream = sys.stderr if stream is None else stream
        self._row: dict[str, Any] = {}
        self._reached = self._remark = ""
        self._evaluations: list[Mapping[str, Any]] = []
        self._first: tuple[float, float] | None = None
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._shares: dict[str, float] = {}
        self._live: Live | None = None
        if live is None:
            live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._due = 0.0 if live else time.monotonic() + PLAIN_S
        if live:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, force_terminal=True, highlight=False, markup=False)
            self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()

    def row(self, row: Mapping[str, Any]) -> None:
        """Take in a training row, and redraw if that is due."""
        self._row.update(row)
        for part in PARTS:
            self._spent[part] += row.get(part) or 0.0
        if self._first is None:
            self._first = (self._done(), row.get("seconds", 0.0))
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + (REDRAW_S if self._live else PLAIN_S)
        self._show()

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Show an evaluation at once."""
        self._row.update({name: row[name] for name in ("epoch", "seconds") if row.get(name) is not None})
        if row.get("bits_per_byte") is not None:
            self._reached = f"{row['bits_per_byte']:.3f} bits/byte"
        elif row.get("accuracy") is not None:
            self._reached = f"accuracy {100 * row['accuracy']:.1f} %{self._last_epochs(row)}"
        self._due = time.monotonic() + (REDRAW_S if self._live else PLAIN_S)
        self._show()

    def _last_epochs(self, row: Mapping[str, Any]) -> str:
        """Return, at the end of a run, the median of its last five epochs; nothing if fewer were seen."""
        self._evaluations.append(row)
        median = median_of_last_epochs(self._evaluations)
        if median is None or len(self._evaluations) < 5 or row.get("epoch", 0.0) < self._epochs * (1 - 1e-9):
            return ""
        return f" (last five {100 * median:.1f} %)"

    def noted(self, text: str, **facts: Any) -> None:
        """Show a remark on a line of its own, unless it says what the one before it said."""
        if text == self._remark:
            return
        self._remark = text
        if self._live:
            from rich.text import Text

            self._live.console.print(Text(_printable(text)))
        else:
            print(_printable(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back; harmless when called twice."""
        if self._live:
            if self._row:
                self._live.update(self._line(self._live.console.width), refresh=True)
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _show(self) -> None:
        total = sum(self._spent.values())
        if total > 0:
            self._shares = {part: spent / total for part, spent in self._spent.items()}
            self._spent = dict.fromkeys(PARTS, 0.0)  # the next line covers the time since this one
        if self._live:
            self._live.update(self._line(self._live.console.width), refresh=True)
        else:
            print("  ".join([self._title, *self._facts().values()]), file=self._stream, flush=True)

    def _facts(self) -> dict[str, str]:
        """Return what there is to show, in this order."""
        row, facts = self._row, {}
        facts["epoch"] = f"epoch {row.get('epoch', 0.0):.2f}/{self._epochs:g}"
        if self._steps is not None:
            facts["epoch"] = f"step {row.get('step', 0)}/{self._steps}"
        if self._reached:
            facts["accuracy"] = self._reached
        if "loss" in row:
            finite = isinstance(row["loss"], int | float) and math.isfinite(row["loss"])
            facts["loss"] = f"loss {row['loss']:.4f}" if finite else "loss not finite"
        if row.get("tokens_per_s"):
            facts["rate"] = f"{row['tokens_per_s']:,.0f} tokens/s"
        elif row.get("images_per_s"):
            facts["rate"] = f"{row['images_per_s']:,.0f} {self._unit}/s"
        seconds = row.get("seconds", 0.0)
        begun, since = self._first or (0.0, 0.0)
        done = self._done()
        if done >= 1.0:
            facts["time"] = f"{clock(seconds)} in all"
        elif done > begun and seconds > since:  # a resumed run does not start at epoch 0
            facts["time"] = f"{clock((seconds - since) / (done - begun) * (1.0 - done))} left"
        elif seconds:
            facts["time"] = f"{clock(seconds)} gone"
        if row.get("noise_scale") is not None:
            facts["noise"] = f"noise scale {row['noise_scale']:,.0f}"
        if self._shares:
            facts["split"] = " ".join(f"{name} {100 * self._shares[part]:.0f} %" for part, name in PARTS.items())
        if row.get("slowest_rank") is not None:
            facts["slowest"] = f"slowest rank {row['slowest_rank']}"
        return facts

    def _done(self) -> float:
        """Return the fraction of the run that is over, by epochs, or by steps if those end it sooner."""
        over = float(self._row.get("epoch", 0.0)) / self._epochs
        if self._steps is not None:
            over = max(over, self._row.get("step", 0) / self._steps)
        return min(1.0, max(0.0, over))

    def _line(self, width: int) -> Text:
        """Return one line that fits: on a narrow terminal the least important facts are left out, and nothing wraps."""
        from rich.text import Text

        facts = {"title": self._title, **self._facts()}
        room = width - 1  # writing the last column makes some terminals wrap
        for name in ("noise", "slowest", "split", "title", "loss", "rate", "accuracy", "time"):
            if sum(len(text) + 2 for text in facts.values()) + 8 <= room:
                break
            facts.pop(name, None)
        bar = min(30, max(0, room - sum(len(text) + 2 for text in facts.values())))
        done = round(bar * self._done())
        line = Text(no_wrap=True, overflow="crop", end="")
        if "title" in facts:
            line.append(facts.pop("title") + "  ", style="bold")
        line.append("━" * done, style="green")
        line.append("━" * (bar - done), style="dim")
        styles = {"accuracy": "bold green", "split": "dim", "slowest": "yellow"}
        for name, text in facts.items():
            line.append(("  " if line else "") + text, style=styles.get(name, ""))
        line.truncate(room)
        return line


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
