"""Progress: fits its line, is sparse, and never writes control characters where nobody watches."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time

import pytest
from rich.cells import cell_len

from bigstep.engine.observers import progress as progress_module
from bigstep.engine.observers.progress import Progress

ROW = {
    "kind": "train", "step": 120, "epoch": 3.21, "samples": 38_520, "loss": 0.53217, "lr": 0.4, "batch": 1024,
    "images_per_s": 12_345.6, "seconds": 40.0, "compute_s": 0.8, "exchange_s": 0.15, "data_s": 0.05, "slowest_rank": 2,
}  # fmt: skip
START = {**ROW, "step": 1, "epoch": 0.01, "seconds": 0.1}
EVALUATION = {"kind": "eval", "step": 120, "epoch": 3.21, "seconds": 40.0, "accuracy": 0.8712, "eval_loss": 0.41}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_lines_one_per_evaluation_and_few_others() -> None:
    stream = io.StringIO()
    with Progress("sony mini", 10, stream) as shown:
        for _ in range(1000):
            shown.row(ROW)
        shown.evaluated(EVALUATION)
        shown.noted("rank 3\x1b[31m is back\r")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "accuracy 87.1 %" in lines[0]
    assert "compute 80 % exchange 15 % data 5 %" in lines[0]
    assert "slowest rank 2" in lines[0]
    assert lines[1] == "rank 3 [31m is back "
    assert all(letter.isprintable() for line in lines for letter in line)


def test_a_remark_is_not_said_twice_in_a_row() -> None:
    stream = io.StringIO()
    with Progress("adamw", 1, stream) as shown:
        for remark in ("far beyond", "far beyond", "rank 1 is slow", "far beyond"):
            shown.noted(remark)
    assert stream.getvalue().splitlines() == ["far beyond", "rank 1 is slow", "far beyond"]


def test_the_end_of_a_run_tells_the_median_of_its_last_five_epochs() -> None:
    stream = io.StringIO()
    with Progress("fair", 6, stream) as shown:
        for epoch, accuracy in enumerate((0.1, 0.2, 0.9, 0.3, 0.8, 0.5), 1):
            shown.evaluated({**EVALUATION, "epoch": float(epoch), "accuracy": accuracy})
    lines = stream.getvalue().splitlines()
    assert "accuracy 50.0 % (last five 50.0 %)" in lines[-1]
    assert not any("last five" in line for line in lines[:-1])


def test_a_pipe_hears_from_a_long_epoch_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    shown = Progress("plain", 10, stream)
    for second in range(35):
        now[0] = float(second)
        shown.row({**ROW, "seconds": second, "epoch": second / 100})
    assert len(stream.getvalue().splitlines()) == 3


def test_the_live_line_is_redrawn_at_most_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    stream = Terminal()
    shown = Progress("plain", 10, stream)
    for millisecond in range(1000):
        now[0] = millisecond / 1000
        shown.row(ROW)
    redraws = stream.getvalue().count("epoch 3.21")
    shown.close()
    assert 5 <= redraws <= 11


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_the_live_line_never_wraps(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    shown = Progress("a long title of a run " * 2, 10, stream)
    shown.row(START)
    shown.evaluated(EVALUATION)
    shown.row(ROW)
    shown.close()
    shown.close()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    lines = [part for part in re.split(r"[\r\n]", drawn) if part.strip()]
    assert lines
    assert max(cell_len(line) for line in lines) < width
    assert stream.getvalue().endswith("\x1b[?25h"), "the cursor must come back"


def test_sixty_columns_keep_what_matters() -> None:
    shown = Progress("sony", 10, io.StringIO(), live=False)
    shown.row(START)
    shown._row.update(ROW)
    shown._reached = "accuracy 87.1 %"
    line = shown._line(60).plain
    assert "epoch 3.21/10" in line
    assert "87.1 %" in line
    assert "left" in line
    assert "━" in line


def test_time_left_counts_from_where_a_resumed_run_began() -> None:
    shown = Progress("plain", 10, io.StringIO(), live=False)
    shown.row({"epoch": 8.0, "seconds": 0.0})
    shown._row.update({"epoch": 9.0, "seconds": 60.0})
    assert shown._facts()["time"] == "1:00 left"


def test_a_loss_that_is_not_finite_is_said_so() -> None:
    shown = Progress("plain", 10, io.StringIO(), live=False)
    for loss in (None, float("nan"), float("inf")):
        shown._row = {"loss": loss}
        assert shown._facts()["loss"] == "loss not finite"


def test_a_call_that_draws_nothing_is_cheap() -> None:
    shown = Progress("plain", 10, io.StringIO(), live=False)
    began = time.perf_counter()
    for _ in range(10_000):
        shown.row(ROW)
    # 100 us a call would still be under 1 % of a 10 ms step; it is about 2 us here
    assert (time.perf_counter() - began) / 10_000 < 1e-4


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress("plain", 10, stream) as shown:
        shown.evaluated(EVALUATION)
    assert "\x1b" not in stream.getvalue()


def test_no_rich_and_no_torch_without_a_terminal() -> None:
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('p', sys.argv[1]);"
        "m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m);"
        "m.Progress('x', 1, live=False); assert not {'torch', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(progress_module.__file__)], check=True)


def test_notes_stand_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with Progress("plain", 10, stream) as shown:
        shown.row(ROW)
        shown.noted("a [bold]remark[/bold]")
    assert "a [bold]remark[/bold]" in stream.getvalue()


def test_notes_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    with Progress("plain", 10, stream) as shown:
        shown.noted("the batch lies beyond the gradient noise scale :car: in runs/plain-mini")
    assert "the batch lies beyond the gradient noise\nscale :car: in runs/plain-mini\n" in stream.getvalue()
