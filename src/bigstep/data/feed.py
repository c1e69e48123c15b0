"""From requests for samples to batches on the device: what the training loop iterates over.

A source chooses how its samples are fed: those held in memory stay on the device and are gathered there
(`device_memory`); files, and users' own data sets, go through loader processes (`loaders`). Either way each request
yields one batch, in order, and what a sample looks like depends on (seed, epoch, index) alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from bigstep.data.sources.given import as_source
from bigstep.data.view import Decoding, Request, View
from bigstep.data.waits import Waits

__all__ = ["Feed", "Request"]


class Feed:
    """Yield (inputs, targets) on the device for each request.

    Args:
        source: anything that `as_source` takes: a source, or a map-style data set of pairs (x, y).
        train: whether to augment.
        seed: of the run.
        augment: none, flip, crop_flip, crop_alternate or resized_crop; a user's own data must be images for it.
        shift: the largest shift of crop_flip and crop_alternate, in pixels.
        image_size: side of the images in pixels; 0 keeps the set's own size, which a folder does not have.
        device: where the batches go.
        dtype: of the images; a user's own inputs and targets are converted if they are floating-point.
        loaders: processes that load files or a user's own data set, or threads where the device decodes; 0 loads in
            this process.
        rectangular: evaluate a folder on whole images, in the batches that `evaluation_batches` gives.
        decoding: who decodes image files; `bigstep.data.decoders.choose.choose` chooses.

    >>> from bigstep.data import TensorImages
    >>> tiny = TensorImages(images=torch.full((4, 1, 2, 2), 255, dtype=torch.uint8), labels=torch.tensor([0, 1, 0, 1]),
    ...                     classes=("a", "b"), mean=(0.5,), std=(0.5,), name="tiny")
    >>> feed = Feed(tiny, train=False)
    >>> [(images.shape[0], images.mean().item(), labels.tolist())
    ...  for images, labels in feed([Request(0, torch.tensor([1, 2, 3])), Request(0, torch.tensor([0]))])]
    [(3, 1.0, [1, 0, 1]), (1, 1.0, [0])]
    >>> feed.shape
    {'classes': 2, 'channels': 1, 'image_size': 2}
    """

    def __init__(
        self,
        source: Any,
        *,
        train: bool,
        seed: int = 0,
        augment: str = "none",
        shift: int = 4,
        image_size: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        loaders: int = 0,
        rectangular: bool = False,
        decoding: Decoding = Decoding(),  # noqa: B008 - frozen
    ) -> None:
        self.source = as_source(source)
        self.device = torch.device(device)
        self._view = View(
            train=train,
            seed=seed,
            augment=augment,
            shift=shift,
            image_size=image_size,
            device=self.device,
            dtype=dtype,
            loaders=loaders,
            rectangular=rectangular,
            decoding=decoding,
        )
        self._way = self.source.feed(self._view)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def shape(self) -> dict[str, int]:
        """What `build_model` needs to know: classes, channels and image_size, or vocabulary and length of sequences."""
        inputs = self.source.inputs(self._view.image_size)
        return {"vocabulary" if "length" in inputs else "classes": self.source.num_classes, **inputs}

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample as the network gets it."""
        return self.source.input_shape(self._view.image_size)

    @property
    def length(self) -> int:
        """Tokens of a sequence; 0 if samples are not sequences."""
        return self.source.inputs(self._view.image_size).get("length", 0)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty where a user's own data set has no attribute `classes`."""
        return self.source.classes

    @property
    def num_classes(self) -> int:
        """Number of classes, or of different tokens; `OwnItems` says how it is found for a user's own data set."""
        return self.source.num_classes

    @property
    def channels(self) -> int:
        """Channels of an image, length of a vector, or 1 for tokens."""
        return self.source.inputs(self._view.image_size).get("channels", 1)

    @property
    def image_size(self) -> int:
        """Side of the images in pixels; of other samples, their length."""
        inputs = self.source.inputs(self._view.image_size)
        return inputs.get("image_size") or inputs["length"]

    def resize(self, image_size: int, min_scale: float = 0.08) -> None:
        """Progressive resizing: from the next call on, batches have this size and crops at least this area fraction."""
        self._view = dataclasses.replace(self._view, image_size=image_size, min_scale=min_scale)
        self._way.see(self._view)

    @property
    def loaders(self) -> int | None:
        """Processes that load, or threads where the device decodes; None if the samples are in memory."""
        return self._way.loaders

    @property
    def waits(self) -> Waits | None:
        """How long a GPU waited for each batch; None if the samples are in memory or the device is a CPU."""
        return self._way.waits if self.device.type == "cuda" else None

    @property
    def decoding(self) -> Decoding:
        """Who decodes image files."""
        return self._view.decoding

    def spent(self) -> dict[str, float]:
        """Return the seconds that reading, decoding and copying took so far; empty if the samples are in memory."""
        waits = self._way.waits
        return {} if waits is None else waits.parts(self._way.loaders or 0)

    def evaluation_batches(self, batch: int) -> list[Tensor]:
        """Divide all samples into batches of at most `batch`, each sample in one: in order, or by shape if rectangular.

        Ranks that share an evaluation take batches[rank::ranks]; what a sample looks like does not depend on it.
        """
        return self.source.batches(batch, self._view)

    def __call__(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one batch for each request; loaders work ahead of the consumer."""
        dtype = self._view.dtype
        for inputs, targets in self._way(requests):
            yield inputs, targets.to(dtype) if targets.is_floating_point() else targets

    def close(self) -> None:
        """End the loader processes; a later call starts new ones."""
        self._way.close()
