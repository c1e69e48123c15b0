"""The interface of decoders: a decoder loads a chunk of images, each at the crop that was drawn for it.

Crops are drawn from the sizes in the files' headers, before anything is decoded, so which part of an image is shown
never depends on the decoder.
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
"""The contents of a file."""


class Crop(NamedTuple):
    """The part of an image that is wanted."""

    box: Box
    shape: tuple[int, int]
    """Width and height of the result in pixels."""
    snapped: bool
    """Move the box to whole pixels and read nothing outside it, which is faster."""


class Crops(NamedTuple):
    """The crops of a chunk, as arrays: an object for each image takes longer to make than the image to read."""

    boxes: NDArray[np.float64]
    """(N, 4): left, top, right and bottom of each box in pixels."""
    shape: tuple[int, int]
    snapped: bool

    def of(self, row: int) -> Crop:
        """Return the crop of one image."""
        left, top, right, bottom = self.boxes[row].tolist()
        return Crop((left, top, right, bottom), self.shape, self.snapped)


Draw = Callable[[Sequence[tuple[int, int]]], Crops]
"""(width and height of each image) -> their crops."""


class Files(Protocol):
    """Where the bytes of images come from."""

    def content(self, index: int) -> Buffer:
        """Read the stored bytes of an image."""

    def contents(self, indices: list[int], room: memoryview | None = None) -> list[Buffer]:
        """Read the stored bytes of some images; into `room`, if they have to be read at all and fit."""

    def size(self, index: int, content: Buffer | None = None) -> tuple[int, int]:
        """Return width and height of an image in pixels."""

    def open(self, index: int, content: Buffer | None = None) -> AbstractContextManager[Image.Image]:
        """Read the header of an image; any error inside the `with` block becomes a `DataError` that names the image."""


class Mixed(NamedTuple):
    """How a chunk is divided between the device and the cores."""

    share: float
    """The part that the device decodes of the images that it can take."""
    by: str
    """Who decodes the others."""
    pinned: bool
    """Whether images decoded here are put into pinned memory, to be copied to a GPU."""


class Coded(NamedTuple):
    """A chunk of which some images are still coded: the device decodes them, and cuts all."""

    pixels: Tensor
    """uint8 (P, height, width, 3): images that were decoded and cut already."""
    files: Sequence[Tensor]
    """uint8: the bytes of each of the others."""
    sizes: NDArray[np.int64]
    """(C, 2): width and height of each in pixels."""
    rows: NDArray[np.int64]
    """Their rows in the chunk; the other rows are in `pixels`, in order."""
    boxes: NDArray[np.float64]
    """(C, 4): left, top, width and height of each box in pixels."""
    bounds: NDArray[np.int64]
    """(C, 4): left, top, right and bottom of the part that may be read."""
    room: memoryview
    """The memory that the files may have been read into, to be reused once they are decoded."""


class Decoder(Protocol):
    """One way of decoding, in a loader process."""

    def __call__(self, files: Files, indices: list[int], draw: Draw) -> tuple[Tensor, Spent]:
        """Load a chunk as uint8 crops, NCHW."""
