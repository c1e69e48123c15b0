"""Which JPEG files any decoder may have: read from the header, so that no decoder guesses in its own way."""

from __future__ import annotations

from PIL import Image

from bigstep.data.decoders.base import Buffer

__all__ = ["why_not_plain"]

_ORIENTATION = 0x0112
_END = b"\xff\xd9"


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
