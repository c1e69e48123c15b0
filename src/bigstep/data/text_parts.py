"""A text, a part at a time: as characters or pieces, all of it would take ten times the memory of its bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bigstep.errors import DataError

__all__ = ["character_at", "characters", "pieces_of", "whole_text"]

_AT_ONCE = 2**24  # bytes that are divided in one go
_PIECES = re.compile(rb" ?\w+| ?[^\w\s]+|\s+")  # every byte belongs to one piece; a space to the word after it


def pieces_of(text: bytes, where: str) -> Iterator[list[bytes]]:
    """Yield lists of words, punctuation and spaces, which together make up all of a text."""
    _refuse_binary(text, where)
    begin, room = 0, _AT_ONCE
    while begin < len(text):
        end = min(begin + room, len(text))
        pieces = _PIECES.findall(text, begin, end)
        if end < len(text):
            end -= len(pieces.pop())  # the last may continue in the next part
        if pieces:
            yield pieces
            begin, room = end, _AT_ONCE
        else:
            room *= 2


def characters(text: bytes, where: str) -> Iterator[str]:
    """Yield the characters of a text, some at a time."""
    _refuse_binary(text, where)
    begin = 0
    while begin < len(text):
        end = min(begin + _AT_ONCE, len(text))
        if end < len(text):
            end = character_at(text, end)
        yield _decoded(text[begin:end], where, begin)
        begin = end


def character_at(text: bytes, place: int) -> int:
    """Return where the UTF-8 character that contains the byte at `place` begins; `place` itself if none does.

    >>> character_at("äö".encode(), 3), character_at("äö".encode(), 1), character_at(bytes([0x80] * 9), 8)
    (2, 0, 8)
    """
    begins = (at for at in range(place, max(place - 4, -1), -1) if text[at] & 0xC0 != 0x80)
    return next(begins, place)


def whole_text(text: bytes, where: str) -> str:
    """Return all characters of a text at once."""
    _refuse_binary(text, where)
    return _decoded(text, where)


def _decoded(text: bytes, where: str, begin: int = 0) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text (byte {begin + error.start:,} is invalid); set data.vocabulary=bytes, or "
            "convert it."
        ) from None


def _refuse_binary(text: bytes, where: str) -> None:
    if b"\0" in text:
        raise DataError(f"{where} is not text (it holds bytes of value 0); set data.vocabulary=bytes.")
