"""The three streams of the program: opened where they were closed, and readable where the locale has few characters."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import io
import os
import shutil
import sys
import textwrap
from typing import TextIO

__all__ = ["fill_streams", "folded_for", "show_for_now"]

_PLAIN = str.maketrans(
    {
        **dict.fromkeys("·•●", "*"),
        **dict.fromkeys("–—−─━┄╌", "-"),
        **dict.fromkeys("‘’", "'"),
        **dict.fromkeys("“”", '"'),
        **dict.fromkeys("│┤├┃", "|"),
        **dict.fromkeys("█▉▊▋▌▍▎▏■", "#"),
        "×": "x",
        "→": "->",
        "…": "...",
        "≈": "~",
        "≤": "<=",
        "≥": ">=",
        "µ": "u",
        "°": " deg",
        "²": "^2",
        "\N{NO-BREAK SPACE}": " ",
        "\N{NARROW NO-BREAK SPACE}": " ",
    }
)
_UPPER, _LOWER = 0x01 | 0x02 | 0x08 | 0x10, 0x04 | 0x20 | 0x40 | 0x80
"""The dots of a braille character, of which charts are made, in the upper and in the lower half of its place."""


def fill_streams() -> None:
    """Open what was closed before the start: else the first file of a run would get the number of standard output.

    What a stream cannot encode is printed as a plain character that says the same, else escaped: a locale may know
    ASCII only, and a name of a file may be no UTF-8.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # not within the assert, which python -O leaves out
            assert opened == number, "the lowest number is free"
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115 - open as long as the process
    codecs.register_error("bigstep.plain", _in_plain_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="bigstep.plain")


def folded_for(stream: TextIO, sentence: str) -> str:
    """Return a sentence broken between words where a person reads it on a terminal, which would break within them."""
    if not stream.isatty():
        return sentence
    width = shutil.get_terminal_size().columns
    return textwrap.fill(sentence, width, break_long_words=False, break_on_hyphens=False)


def show_for_now(line: str) -> None:
    """Show a line on the terminal until the next output, which takes its place; nothing is shown elsewhere.

    The cursor stays at its beginning, and what is left of it when the program ends is wiped away.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return
    atexit.unregister(_wipe)  # once is enough
    atexit.register(_wipe)
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"\r\x1b[K{line[:width]}\r")
    sys.stderr.flush()


def _wipe() -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[K")
            sys.stderr.flush()


def _in_plain_characters(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    dots = ord(character) - 0x2800
    if 0 <= dots < 0x100:
        return ":" if dots & _UPPER and dots & _LOWER else "'" if dots & _UPPER else "." if dots else " "
    plain = character.translate(_PLAIN)
    return plain if plain.isascii() else plain.encode("ascii", "backslashreplace").decode()
