"""One image file to one array of pixels: header checked first, decoded at the smallest size that suffices.

Orientation tags (EXIF) are ignored, as in the published ImageNet pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bigstep.data.background import in_threads
from bigstep.errors import DataError

__all__ = ["centre_box", "cut", "cut_fast", "image_sizes", "open_image", "snap", "snap_all", "whole_box"]

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels of the stored image; fractions are fine."""

_FORMATS = ["JPEG", "PNG", "WEBP", "BMP"]
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}
MAX_PIXELS = 2**26  # 200 MB decoded; below the limit at which Pillow itself warns


@contextmanager
def open_image(path: Path | str, content: BinaryIO | None = None) -> Iterator[Image.Image]:
    """Open an image file and check what its header says; pixels are not decoded yet.

    Any error inside the `with` block, too, becomes a `DataError` that names the file.

    Args:
        path: the file; what to call it in a message if the content is given.
        content: what the file would hold.
    """
    try:
        with Image.open(path if content is None else content, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(f"{path} has {width} x {height} pixels, more than the {MAX_PIXELS:,} that are read.")
            if image.mode not in _MODES:
                raise DataError(f"{path} has pixels of type {image.mode}; convert it to 8 bits per channel.")
            yield image
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"{path} has more than the {MAX_PIXELS:,} pixels that are read.") from None
    except Exception as error:  # Pillow has no error of its own: a damaged file can raise nearly anything
        told = str(path) if content is None else content
        reason = getattr(error, "strerror", None) or str(error).removesuffix(f" {told!r}") or type(error).__name__
        raise DataError(f"{path} cannot be decoded: {reason}.") from None


def cut(image: Image.Image, box: Box, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Decode the part of an opened image that lies in `box`, resized to `shape` (width, height), as RGB of HWC.

    A JPEG is decoded at a half, a quarter or an eighth of its size where that still covers `shape`; the rest of the
    way is one antialiased bilinear resampling of the box.
    """
    pixels, scaled = _decoded(image, box, shape)
    return np.asarray(pixels.resize(shape, Image.Resampling.BILINEAR, box=scaled))


def cut_fast(image: Image.Image, box: Box, shape: tuple[int, int]) -> Tensor:
    """Do what `cut` does, with the box moved to whole pixels: torch resamples bytes three times as fast as Pillow."""
    pixels, scaled = _decoded(image, box, shape)
    part = pixels.crop(snap(scaled, pixels.size))
    batch = torch.from_numpy(np.array(part)[None]).permute(0, 3, 1, 2)  # channels_last, which torch keeps
    resized = F.interpolate(batch, size=(shape[1], shape[0]), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1)[0]


def snap(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Move a box to whole pixels of an image of this size (width, height); it keeps at least one pixel.

    >>> snap((3.4, 2.6, 35.4, 34.6), (64, 48)), snap((63.8, 47.9, 64.0, 48.0), (64, 48))
    ((3, 3, 35, 35), (63, 47, 64, 48))
    """
    left, top = min(round(box[0]), size[0] - 1), min(round(box[1]), size[1] - 1)
    return left, top, max(round(box[2]), left + 1), max(round(box[3]), top + 1)


def snap_all(boxes: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Move many boxes to whole pixels, as `snap` does.

    Args:
        boxes: (N, 4), left, top, right and bottom.
        sizes: (N, 2), width and height of each image.

    >>> snap_all(np.array([[3.4, 2.6, 35.4, 34.6], [63.8, 47.9, 64, 48]]), np.array([[64, 48], [64, 48]])).tolist()
    [[3, 3, 35, 35], [63, 47, 64, 48]]
    """
    whole: NDArray[np.int64] = np.rint(boxes).astype(np.int64)  # halves to even, as `round` does
    begin = np.minimum(whole[:, :2], sizes - 1)
    return np.concatenate([begin, np.maximum(whole[:, 2:], begin + 1)], 1)


def _decoded(image: Image.Image, box: Box, shape: tuple[int, int]) -> tuple[Image.Image, Box]:
    """Decode an opened image, no larger than needed, as RGB; return it with the box in its pixels."""
    width, height = image.size
    left, top, right, bottom = box
    # the size at which the box would just cover the shape
    image.draft(None, (math.ceil(width * shape[0] / (right - left)), math.ceil(height * shape[1] / (bottom - top))))
    across, down = image.width / width, image.height / height
    scaled = (  # rounding must not carry a box over the edge
        max(left * across, 0.0),
        max(top * down, 0.0),
        min(right * across, image.width),
        min(bottom * down, image.height),
    )
    pixels: Image.Image = image
    if pixels.mode in ("P", "PA"):
        pixels = pixels.convert("RGBA")  # converted to RGB directly, a palette with transparency loses its colours
    if pixels.mode != "RGB":
        pixels = pixels.convert("RGB")
    return pixels, scaled


def centre_box(width: int, height: int, fraction: float = 0.875) -> Box:
    """Return the centred square whose side is `fraction` of the short side.

    >>> centre_box(400, 200)
    (112.5, 12.5, 287.5, 187.5)
    """
    side = fraction * min(width, height)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def whole_box(width: int, height: int, shape: tuple[int, int]) -> Box:
    """Return the largest centred box with the aspect ratio of `shape` (width, height).

    >>> whole_box(400, 200, (100, 100))
    (100.0, 0.0, 300.0, 200.0)
    """
    scale = min(width / shape[0], height / shape[1])
    w, h = scale * shape[0], scale * shape[1]
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def image_sizes(paths: Iterable[Path]) -> Tensor:
    """Read width and height of each file from its header, (N, 2)."""

    def size(path: Path) -> tuple[int, int]:
        with open_image(path) as image:
            return image.size

    found = in_threads(size, paths, threads=8, ahead=64)  # threads wait for a disk or file server
    return torch.tensor(list(found), dtype=torch.int64).view(-1, 2)
