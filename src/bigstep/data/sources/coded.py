"""Images that are decoded as they are needed, wherever their bytes are stored."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bigstep.data.augment import Augment, resized_crop_boxes
from bigstep.data.background import in_threads
from bigstep.data.decode import centre_box, cut, whole_box
from bigstep.data.decoders import nvjpeg, pillow
from bigstep.data.decoders.base import Buffer, Crops, Decoder, Draw, Mixed
from bigstep.data.device_decoding import DeviceDecoding, Normal
from bigstep.data.loaders import Chunk, Finish, Job, Loaders
from bigstep.data.pixels import count_values, moments
from bigstep.data.rectangles import rectangle_of, rectangular_batches
from bigstep.data.sources.base import Source, spread
from bigstep.data.view import Request, View, Way
from bigstep.described import usable_cores
from bigstep.errors import ConfigError, DataError
from bigstep.tables import load
from bigstep.tables.decoders import DECODERS

__all__ = ["CodedImages", "Look"]

_SAMPLE = 500  # images that are decoded for statistics unless all are asked for
_STATISTICS_SIZE = 64  # side at which they are decoded, in pixels
_READING = 4  # threads that examine images, in addition to one per core: some wait for a disk
_EVALUATED_AT_ONCE = 512  # largest batch on a GPU: two groups that it decodes at once, so the next is soon ready


class CodedImages(Source):
    """Labelled images of many sizes; loader processes decode what is needed of each."""

    unit = "images"
    if TYPE_CHECKING:  # as in Source

        @property
        def labels(self) -> Tensor:
            """The class of each sample, int64."""

        @property
        def mean(self) -> tuple[float, ...]:
            """Of each channel, images scaled to 0..1."""

        @property
        def std(self) -> tuple[float, ...]:
            """Of each channel."""

        @property
        def sizes(self) -> Tensor:
            """Width and height of each image in pixels, (N, 2)."""

    @abstractmethod
    def content(self, index: int) -> Buffer:
        """Read the stored bytes of an image."""

    def contents(self, indices: list[int], room: memoryview | None = None) -> list[Buffer]:
        """Read the stored bytes of some images; into `room`, if they have to be read at all and fit."""
        return [self.content(index) for index in indices]

    @abstractmethod
    def open(self, index: int, content: Buffer | None = None) -> AbstractContextManager[Image.Image]:
        """Open an image; any error inside the `with` block becomes a `DataError` that names the image."""

    @abstractmethod
    def size(self, index: int, content: Buffer | None = None) -> tuple[int, int]:
        """Return width and height of an image in pixels."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Say where an image is stored, for messages."""

    @property
    def channels(self) -> int:
        """Images of every kind are decoded to RGB."""
        return 3

    def inputs(self, image_size: int) -> dict[str, int]:
        """Return channels and side of the images as they are shown."""
        return {"channels": self.channels, "image_size": image_size}

    def feed(self, view: View) -> Way:
        """Decode and crop in loader processes, because the crop decides how much is decoded; or on the device."""
        if not view.image_size:
            raise ConfigError(
                f"{self.name} may hold images of any size; say which size to train on, for example --set "
                "data.image_size=224."
            )
        if DECODERS[view.decoding.name].on_device and view.kind in ("none", "flip", "resized_crop"):
            return DeviceDecoding(view, CodedJobs(self, view.seed), Normal(self.mean, self.std), self.name)

        def prepare(view: View) -> Finish:
            kind = "flip" if view.kind == "resized_crop" else view.kind
            return Augment(kind=kind, seed=view.seed, mean=self.mean, std=self.std, dtype=view.dtype)

        return Loaders(view, CodedJobs(self, view.seed), prepare, self.name)

    def batches(self, batch: int, view: View) -> list[Tensor]:
        """Divide all samples into batches: in order, or by shape if whole images are evaluated."""
        batch = min(batch, _EVALUATED_AT_ONCE) if view.device.type == "cuda" else batch
        if _is_whole(view):
            return rectangular_batches(self.sizes, view.image_size, batch)
        return super().batches(batch, view)

    def thumbnail(self, index: int, side: int) -> Image.Image:
        """Shrink the middle of an image."""
        try:
            with self.open(index) as image:
                return Image.fromarray(cut(image, centre_box(*image.size, fraction=1.0), (side, side)))
        except DataError:
            return Image.new("RGB", (side, side), "red")  # so that a damaged file stands out

    def describe(self, verify: bool) -> dict[str, Any]:
        """Count classes, decode some files (all of them to verify), and describe their pixels."""
        chosen = spread(len(self), len(self) if verify else _SAMPLE).tolist()  # evenly over the classes
        sizes, corrupt, histogram = [], [], torch.zeros(3, 256, dtype=torch.int64)
        threads = usable_cores() + _READING  # decoding releases the interpreter's lock
        examined = in_threads(lambda index: self._examine(index, verify), chosen, threads=threads, ahead=8 * threads)
        for index, seen in zip(chosen, examined, strict=True):
            if isinstance(seen, str):
                corrupt.append({"file": self.where(index), "reason": seen})
            else:
                sizes.append(seen[0])
                histogram += seen[1]
        counts = self.labels.bincount(minlength=len(self.classes)).tolist()
        facts: dict[str, Any] = {"per_class": dict(zip(self.classes, counts, strict=True))}
        if sizes:
            by_area = sorted(sizes, key=lambda size: (math.prod(size), size))
            picks = {"smallest": by_area[0], "median": by_area[len(by_area) // 2], "largest": by_area[-1]}
            facts["sizes"] = {key: list(size) for key, size in picks.items()}
            facts.update(moments(histogram))
        return {**facts, "checked": len(chosen), "corrupt": corrupt}

    def _examine(self, index: int, verify: bool) -> tuple[tuple[int, int], Tensor] | str:
        """Return the size of an image and the counts of its pixels' values, or what is wrong with it."""
        try:
            with self.open(index) as image:
                size = image.size
                if verify:
                    image.load()  # every pixel: a reduced decode can miss damage
                pixels = cut(image, centre_box(*size, fraction=1.0), (_STATISTICS_SIZE, _STATISTICS_SIZE))
        except DataError as error:
            return str(error)
        return size, torch.stack([count_values(torch.from_numpy(pixels[..., c].copy())) for c in range(3)])

    def load_crops(self, indices: list[int], size: int) -> Tensor:
        """Decode for evaluation: the short side shrunk to size / 0.875, then the centre of size x size."""
        return pillow.load(self, indices, Look("centre", (size, size)).draw(indices, 0, 0))[0]

    def load_random_crops(self, indices: list[int], size: int, seed: int, epoch: int, min_scale: float) -> Tensor:
        """Decode for training: a random resized crop of size x size that depends on (seed, epoch, index) alone."""
        return pillow.load(self, indices, Look("random", (size, size), min_scale).draw(indices, seed, epoch))[0]

    def load_rectangles(self, indices: list[int], shape: tuple[int, int]) -> Tensor:
        """Decode whole images, trimmed only as far as the aspect ratio of `shape` (width, height) asks."""
        return pillow.load(self, indices, Look("whole", shape).draw(indices, 0, 0))[0]


class Look(NamedTuple):
    """How the images of a request are shown."""

    crop: Literal["random", "centre", "whole"]
    shape: tuple[int, int]
    """Width and height in pixels."""
    min_scale: float = 0.08
    decoder: str = "pillow"
    """Who loads them."""

    def draw(self, indices: list[int], seed: int, epoch: int) -> Draw:
        """Return the function that gives the crops of these images from their sizes.

        Random boxes are drawn for all images at once, from the sizes in their headers, and moved to whole pixels.
        """

        def draw(sizes: Sequence[tuple[int, int]]) -> Crops:
            if self.crop == "centre":
                return Crops(np.array([centre_box(*size) for size in sizes]), self.shape, snapped=False)
            if self.crop == "whole":
                return Crops(np.array([whole_box(*size, self.shape) for size in sizes]), self.shape, snapped=False)
            width, height = torch.tensor(sizes).T
            boxes = resized_crop_boxes(torch.tensor(indices), seed, epoch, height, width, self.min_scale).T.numpy()
            return Crops(np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1), self.shape, snapped=True)

        return draw


class CodedJobs:
    """Decode to uint8 images of one shape, or read files for the device to decode."""

    def __init__(self, source: CodedImages, seed: int) -> None:
        self.source, self.seed = source, seed

    def look(self, request: Request, view: View) -> Look:
        """Choose crop and shape; whole images of a request have one shape, that of the first."""
        decoding = view.decoding
        decoder = decoding.loaders_use if DECODERS[decoding.name].on_device else decoding.name
        if _is_whole(view):
            width, height = self.source.sizes[request.indices[0]].tolist()
            return Look("whole", rectangle_of(width, height, view.image_size), view.min_scale, decoder)
        crop: Literal["random", "centre"] = "random" if view.kind == "resized_crop" else "centre"
        return Look(crop, (view.image_size, view.image_size), view.min_scale, decoder)

    def __getitem__(self, job: Job) -> Chunk:
        look: Look = job.look
        try:
            decoder: Decoder = load(DECODERS[look.decoder].home)
            images, spent = decoder(self.source, job.indices, look.draw(job.indices, self.seed, job.epoch))
        except DataError as error:
            return str(error)
        return images, self.source.labels[job.indices], spent

    def read(self, job: Job, how: Mixed, room: memoryview) -> Chunk:
        """Read a chunk in a thread, for the device to decode all or part of it."""
        draw = job.look.draw(job.indices, self.seed, job.epoch)
        try:
            coded, spent = nvjpeg.read(self.source, job.indices, draw, how, room)
        except DataError as error:
            return str(error)
        return coded, self.source.labels[job.indices], spent

    def whole(self, index: int, content: Tensor) -> Tensor:
        """Decode on the CPU a whole image that the device has refused, (3, height, width)."""
        with self.source.open(index, content.numpy().data) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _is_whole(view: View) -> bool:
    return view.rectangular and not view.train
