"""Which JPEG files any decoder may take: read from the header, so that no decoder guesses in its own way."""

from __future__ import annotations

import time
from typing import NamedTuple

from PIL import Image

from bigstep.data.decode import MAX_PIXELS
from bigstep.data.decoders.base import Buffer, Files

__all__ = ["Chunk", "plain_size", "read_chunk", "why_not_plain"]

_ORIENTATION = 0x0112
_END = b"\xff\xd9"
_SOF0, _DHT, _APP1, _APP2, _APP14 = 0xC0, 0xC4, 0xE1, 0xE2, 0xEE
_HARMLESS = frozenset([0xFE, 0xDB, 0xDD, _DHT, *range(0xE0, 0xF0)]) - {_APP1}
"""Header segments that a plain file may have: comments, tables, and application segments other than EXIF."""


class Chunk(NamedTuple):
    """Files of images that were read, and what their headers say."""

    contents: list[Buffer]
    sizes: list[tuple[int, int]]
    """Width and height of each in pixels."""
    plain: list[bool]
    """Which of them any decoder may take."""
    read_s: float
    """Seconds that reading the files took, without the headers."""


def read_chunk(files: Files, indices: list[int], room: memoryview | None = None) -> Chunk:
    """Read files, into `room` as far as they fit, and examine their headers."""
    began = time.perf_counter()
    contents = files.contents(indices, room)
    read_s = time.perf_counter() - began
    sizes, plain = [], []
    for index, content in zip(indices, contents, strict=True):
        if (size := plain_size(content)) is not None:
            sizes.append(size)
            plain.append(True)
            continue
        with files.open(index, content) as image:
            sizes.append(image.size)
            plain.append(why_not_plain(image, content) is None)
    return Chunk(contents, sizes, plain, read_s)


def plain_size(content: Buffer) -> tuple[int, int] | None:
    """Return width and height of a JPEG with a simple header, as most have: `why_not_plain` would return None for it.

    It takes a microsecond, where opening a file with Pillow takes thirty. None leaves the decision to Pillow.
    """
    try:
        if content[0] != 0xFF or content[1] != 0xD8 or content[-2:] != _END:
            return None
        at = 2
        while content[at] == 0xFF:
            kind, length = content[at + 1], content[at + 2] << 8 | content[at + 3]
            if kind == _SOF0:
                return _size_in_frame(content[at + 4 : at + 2 + length])
            begins = bytes(content[at + 4 : at + 16])
            if (
                kind not in _HARMLESS
                or (kind == _APP2 and not begins.startswith(b"ICC_PROFILE"))  # perhaps several pictures
                or (kind == _APP14 and not (begins.startswith(b"Adobe") and begins[11] == 1))
            ):
                return None
            at += 2 + length
    except IndexError:  # it ends too early
        pass
    return None


def _size_in_frame(frame: Buffer) -> tuple[int, int] | None:
    """Return the size in a frame header of three 8-bit channels that are not named R, G and B; None for any other."""
    if len(frame) != 15 or frame[0] != 8 or frame[5] != 3 or bytes(frame[6::3]) == b"RGB":
        return None
    height, width = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4]
    return (width, height) if 0 < width * height <= MAX_PIXELS else None


def why_not_plain(image: Image.Image, content: Buffer) -> str | None:
    """Return why a file is left to Pillow, or None for a complete baseline JPEG of three channels.

    Files of other kinds are decoded, or refused, alike everywhere, because one decoder handles all of them.

    Args:
        image: Opened by Pillow, of which only the header was read.
        content: The whole file.
    """
    if image.format != "JPEG":
        return "it is no JPEG"
    if image.mode != "RGB":
        return "it is grey" if image.mode == "L" else f"its pixels are of type {image.mode}"
    if image.info.get("progressive") or image.info.get("progression"):
        return "it is progressive"
    names = [layer[0] for layer in getattr(image, "layer", ())]
    if image.info.get("adobe_transform") == 0 or names == [ord("R"), ord("G"), ord("B")]:
        return "its channels are red, green and blue, not brightness and colour"
    if "exif" in image.info and image.getexif().get(_ORIENTATION, 1) != 1:
        return "it has an orientation, which some decoders heed"
    if bytes(content[-2:]) != _END:
        return "it does not end as a JPEG does"
    return None
