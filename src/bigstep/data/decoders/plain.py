"""Which JPEG files any decoder may have: read from the header, so that no decoder guesses in its own way."""

from __future__ import annotations

import time
from typing import NamedTuple

from PIL import Image

from bigstep.data.decoders.base import Buffer, Files

__all__ = ["Chunk", "read_chunk", "why_not_plain"]

_ORIENTATION = 0x0112
_END = b"\xff\xd9"


class Chunk(NamedTuple):
    """Files of images that were read, and what their headers say."""

    contents: list[Buffer]
    sizes: list[tuple[int, int]]
    """Width and height of each in pixels."""
    plain: list[bool]
    """Which of them any decoder may have."""
    read_s: float
    """Seconds that reading the files took, without the headers."""


def read_chunk(files: Files, indices: list[int]) -> Chunk:
    """Read files and look at their headers."""
    began = time.perf_counter()
    contents = [files.content(index) for index in indices]
    read_s = time.perf_counter() - began
    sizes, plain = [], []
    for index, content in zip(indices, contents, strict=True):
        with files.open(index, content) as image:
            sizes.append(image.size)
            plain.append(why_not_plain(image, content) is None)
    return Chunk(contents, sizes, plain, read_s)


def why_not_plain(image: Image.Image, content: Buffer) -> str | None:
    """Return why a file is left to Pillow, or None for a baseline JPEG of three channels that is there to its end.

    Files of other kinds are decoded alike everywhere, or refused with one sentence, because one decoder sees them all.

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
