"""What is printed can be read: in a locale of few characters, in pages written there, on a narrow terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from bigstep import recipes
from bigstep.cli.streams import fill_streams, show_for_now
from bigstep.engine.launch import program
from bigstep.report.recipes import folded
from test_report import write_run

ASCII_ONLY = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_page_is_the_same_whatever_the_locale(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    for page, environment in (("utf.html", {**os.environ, "PYTHONUTF8": "1"}), ("ascii.html", ASCII_ONLY)):
        words = program("report", "a", "--html", page)
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    pages = [(tmp_path / name).read_bytes() for name in ("ascii.html", "utf.html")]
    first, second = (
        re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d", b"", page) for page in pages
    )  # a minute may end between them
    assert first == second


def test_a_locale_of_few_characters_is_given_plain_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    done = subprocess.run(program("report", "a"), cwd=tmp_path, env=ASCII_ONLY, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"\\u" not in done.stdout
    assert b"\\x" not in done.stdout
    assert b"|" in done.stdout
    assert b"'" in done.stdout, "the curve"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_has_no_plain_character_is_escaped_and_ends_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(f"sys.{name}", stream)
    fill_streams()
    stream.write("1,024 × 2 → “ends” – µ\u2801\u28ff\u2840 \udce9 中")
    stream.flush()
    assert stream.buffer.getvalue() == b'1,024 x 2 -> "ends" - u\':. \\udce9 \\u4e2d'  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", [("recipes", "sony"), ("recipes", "sony", "--yaml"), ("--help",)])
def test_output_that_goes_onto_a_full_disk_is_one_sentence(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(program(*words), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("bigstep: The output cannot be written (No space left on device)")
    assert done.stderr.count("\n") == 1


def test_a_mistake_is_broken_between_words_on_a_terminal(tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    environment = {**os.environ, "COLUMNS": "40"}
    with subprocess.Popen(program("train", "sonny"), cwd=tmp_path, env=environment, stderr=writer) as process:
        assert process.wait() == 2
    os.close(writer)
    with open(reader, "rb", buffering=0) as terminal:
        told = terminal.read(4_096).decode()
    assert told.splitlines() == ["bigstep: Unknown recipe 'sonny': did you", "mean 'sony'?"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_at_once_that_something_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    show_for_now("starting …")
    assert terminal.getvalue() == "\r\x1b[Kstarting …\r", "what comes next takes its place"
    show_for_now("x" * 50)
    assert terminal.getvalue().endswith(f"\r\x1b[K{'x' * 19}\r"), "a line that wrapped would stay"
    monkeypatch.setattr("sys.stderr", plain := io.StringIO())
    show_for_now("starting …")
    assert plain.getvalue() == ""


@pytest.mark.parametrize("words", [("data", "embedded"), ("train", "--steps", "1", "--model", "mlp", "--no-report")])
def test_no_command_is_silent_while_torch_is_loaded(words: tuple[str, ...], tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(program(*words), cwd=tmp_path, env=environment, stdout=writer, stderr=writer) as process:
        first = os.read(reader, 100).decode()
        process.kill()
    os.close(writer)
    os.close(reader)
    assert "starting" in first


@pytest.mark.parametrize("name", recipes.NAMES)
@pytest.mark.parametrize("width", [80, 60])
def test_the_evidence_of_a_recipe_fits_a_terminal_and_loses_no_word(name: str, width: int) -> None:
    evidence = recipes.describe(name).docstring
    shown = folded(evidence, width)
    assert max(map(len, shown.splitlines())) <= width

    def words(text: str) -> set[str]:
        return {word.strip("|-·:\\") for word in text.split() if word != "–"}

    assert words(evidence) <= words(shown)
