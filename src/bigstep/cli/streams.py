"""The three standard streams: opened if they were closed, and readable if the locale has few characters."""

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
"""Bits of the dots in the upper and in the lower half of a braille character; charts are drawn with them."""


def fill_streams() -> None:
    """Open the streams that are closed: else the first file that a run opens would get the descriptor of stdout.

    A character that a stream cannot encode is replaced by a plain one of the same meaning, or escaped: the locale may
    be ASCII only, and the name of a file may be invalid UTF-8.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # outside the assert, which python -O removes
            assert opened == number, "the lowest number is free"
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115 - open as long as the process
    codecs.register_error("bigstep.plain", _in_plain_characters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="bigstep.plain")


def folded_for(stream: TextIO, sentence: str) -> str:
    """Wrap a sentence between words if the stream is a terminal, which would break it within words."""
    if not stream.isatty():
        return sentence
    width = shutil.get_terminal_size().columns
    return textwrap.fill(sentence, width, break_long_words=False, break_on_hyphens=False)


def show_for_now(line: str) -> None:
    """Show a line on the terminal until the next output, which overwrites it; if stderr is no terminal, show nothing.

    The cursor stays at the start of the line, and what is left of it is erased when the program ends.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return
    atexit.unregister(_wipe)  # once is enough
    atexit.register(_wipe)
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"\r\x1b[K{line[:width]}\r")
    sys.stderr.flush()


def _wipe() -> None:
    with contextlib.suppress(OSError, ValueError):  # the stream is closed
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
