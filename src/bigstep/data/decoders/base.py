"""The seam of decoding: a decoder loads a chunk of images, each at the crop that was drawn for it.

Crops are drawn from the sizes in the files' headers, before anything is decoded: which part of an image is shown never
depends on the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bigstep.data.decode import Box
from bigstep.data.waits import Spent

__all__ = ["Buffer", "Coded", "Crop", "Crops", "Decoder", "Draw", "Files", "Mixed"]

Buffer = bytes | memoryview
"""What a file holds."""


class Crop(NamedTuple):
    """What is wanted of an image."""

    box: Box
    shape: tuple[int, int]
    """Width and height of the result in pixels."""
    snapped: bool
    """Move the box to whole pixels and look at nothing outside of it, which is faster."""


class Crops(NamedTuple):
    """What is wanted of the images of a chunk; arrays, since an object for each image takes longer than to read it."""

    boxes: NDArray[np.float64]
    """(N, 4): left, top, right and bottom of each box in pixels."""
    shape: tuple[int, int]
    snapped: bool

    def of(self, row: int) -> Crop:
        """Return what is wanted of one image."""
        left, top, right, bottom = self.boxes[row].tolist()
        return Crop((left, top, right, bottom), self.shape, self.snapped)


Draw = Callable[[Sequence[tuple[int, int]]], Crops]
"""(width and height of each image) -> what is wanted of each."""


class Files(Protocol):
    """Where the bytes of images come from."""

    def content(self, index: int) -> Buffer:
        """Read what is stored of an image."""

    def contents(self, indices: list[int], room: memoryview | None = None) -> list[Buffer]:
        """Read what is stored of some images; into `room`, where it has to be read at all and there is room for it."""

    def size(self, index: int, content: Buffer | None = None) -> tuple[int, int]:
        """Return width and height of an image in pixels."""

    def open(self, index: int, content: Buffer | None = None) -> AbstractContextManager[Image.Image]:
        """Read the header of an image; what goes wrong inside the `with` block becomes a `DataError` that names it."""


class Mixed(NamedTuple):
    """How a chunk is divided between the device and the cores."""

    share: float
    """The part of the images that the device decodes, of those that it may have."""
    by: str
    """Who decodes the others."""
    pinned: bool
    """Whether what is decoded here is put into pinned memory, for its way to a GPU."""


class Coded(NamedTuple):
    """A chunk of which some images are still coded: the device decodes them, and cuts all."""

    pixels: Tensor
    """uint8 (P, height, width, 3): images that were decoded and cut already."""
    files: Sequence[Tensor]
    """uint8: the bytes of each of the others."""
    sizes: NDArray[np.int64]
    """(C, 2): width and height of each in pixels."""
    rows: NDArray[np.int64]
    """Which rows of the chunk they are; the rest is in `pixels`, in order."""
    boxes: NDArray[np.float64]
    """(C, 4): left, top, width and height of each box in pixels."""
    bounds: NDArray[np.int64]
    """(C, 4): left, top, right and bottom of what may be looked at."""
    room: memoryview
    """What the files may have been read into, to be used again once they are decoded."""


class Decoder(Protocol):
    """One way of decoding, in a loader process."""

    def __call__(self, files: Files, indices: list[int], draw: Draw) -> tuple[Tensor, Spent]:
        """Load a chunk: uint8 crops of NCHW."""
