"""Feeding images that the device decodes: loader processes read, a thread lets the device decode, cut and normalise.

Batches are made ready in a stream of their own, ahead of what is computed. Where loader processes decode a part of the
chunks (`both`), one kernel takes what they cut and what the device decoded alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigstep.data.augment import mirrored
from bigstep.data.background import in_background
from bigstep.data.decoders import nvjpeg
from bigstep.data.decoders.base import Coded
from bigstep.data.decoders.share import Share
from bigstep.data.device_memory import move_indices
from bigstep.data.loaders import Batch, Finish, Job, Loaders
from bigstep.data.view import Request, View
from bigstep.gpu.crops import Parts, crop_batch

__all__ = ["DeviceDecoding", "Normal"]

_AHEAD = 3  # batches of training that may be ready before they are taken: 0.6 MB an image of 224 x 224 in float32
_TOGETHER = 256  # images that the device decodes at once: what bounds its memory, 0.6 MB each at 500 x 375


class Normal(NamedTuple):
    """What the pixels of a source are normalised by."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class DeviceDecoding(Loaders):
    """Yield batches of coded images that the device decodes, all or some.

    Args:
        view: how the samples are wanted; its `decoding` says who decodes.
        jobs: what a loader process does with a chunk; its `whole` decodes one image on the CPU.
        normal: mean and deviation of the source.
        name: of the source, for messages.
    """

    def __init__(self, view: View, jobs: Any, normal: Normal, name: str) -> None:
        only = view.decoding.name == "nvjpeg"
        self._share = Share(1.0 if only else view.decoding.share, fixed=only)
        self._normal = normal
        self._waiting = False  # whether somebody waits for a batch right now
        self._running: Generator[Batch] | None = None
        super().__init__(view, jobs, _as_it_is, name)

    @property
    def share(self) -> float:
        """The part of the chunks that the device decodes at present."""
        return self._share.value

    def jobs(self) -> Iterator[Job]:
        """Yield the chunks of the present requests, dealt out between the device and the loader processes."""
        for job in super().jobs():
            decoder = "nvjpeg" if self._share.next() else self._view.decoding.loaders_use
            yield job._replace(look=job.look._replace(decoder=decoder))

    def _arriving(self, requests: Iterable[Request]) -> Generator[Batch]:
        """Yield batches that a thread made ready."""
        loaded = self._loaded(requests)  # here: a process that forks in a thread inherits what others have locked
        ahead = _AHEAD if self._view.train else 1  # evaluation has far larger batches
        batches = self._running = in_background(self._decoded(loaded), ahead)
        with contextlib.closing(batches):
            while True:
                self._waiting = True
                batch = next(batches, None)
                self._waiting = False
                if batch is None:
                    return
                yield batch

    def _decoded(self, loaded: Iterator[tuple[Request, list[tuple[Any, Tensor]]]]) -> Generator[Batch]:
        """Yield batches in a stream of their own; this runs in a thread."""
        cuda = self._device.type == "cuda"
        # before the kernels of a step: a few blocks of this one must not wait for all of those
        stream = torch.cuda.Stream(self._device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]  # untyped in torch
        while True:
            asked = time.perf_counter()
            found = next(loaded, None)
            if found is None:
                return
            request, chunks = found
            began = time.perf_counter()
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                inputs = self._cut(request, [chunk[0] for chunk in chunks])
                targets = self._join([chunk[1] for chunk in chunks])
                indices = move_indices(request.indices, self._device)
                ready = self.waits.now()
            done = time.perf_counter()
            self.waits.device_s += done - began
            self._share.heed(began - asked, done - began, starving=self._waiting)
            yield Batch(request.epoch, inputs, targets, indices, ready)

    def _cut(self, request: Request, chunks: list[Any]) -> Tensor:
        """Decode what is coded, and cut, mirror and normalise all images of a batch."""
        view = self._view
        width, height = self._jobs.look(request, view).shape
        layout = torch.channels_last if self._device.type == "cuda" else torch.contiguous_format
        out = torch.empty(
            (len(request.indices), 3, height, width), dtype=view.dtype, device=self._device, memory_format=layout
        )
        turned = torch.zeros(len(request.indices), dtype=torch.bool)
        if view.kind in ("flip", "resized_crop"):
            turned = mirrored(request.indices, view.seed, request.epoch)
        begin = 0
        for group in _grouped(chunks):
            images, boxes, bounds = self._images(group, request.indices[begin:].tolist(), (width, height))
            end = begin + len(images)
            crop_batch(images, Parts(boxes, bounds, turned[begin:end]), out[begin:end], *self._normal)
            begin = end
        assert begin == len(out), "every row of a batch is in one chunk"
        return out

    def _images(
        self, chunks: list[Tensor | Coded], indices: list[int], shape: tuple[int, int]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the images of some chunks on the device, with their boxes and what of each may be looked at."""
        decoded = iter(self._decode(chunks, indices))  # first, while nothing is on its way in this stream
        images: list[Tensor] = []
        boxes = torch.tensor([0, 0, *shape], dtype=torch.float64).repeat(sum(map(_count, chunks)), 1)
        bounds = boxes.long()
        for chunk in chunks:
            if not isinstance(chunk, Coded):
                images += chunk.to(self._device, non_blocking=True).unbind(0)
                continue
            places = torch.from_numpy(len(images) + chunk.rows)
            boxes[places], bounds[places] = torch.from_numpy(chunk.boxes), torch.from_numpy(chunk.bounds)
            cut = iter(chunk.pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2).unbind(0))
            coded = set(chunk.rows.tolist())
            images += [next(decoded if row in coded else cut) for row in range(_count(chunk))]
        return images, boxes, bounds

    def _decode(self, chunks: list[Tensor | Coded], indices: list[int]) -> Sequence[Tensor]:
        """Let the device decode what is coded."""
        contents: list[Tensor] = []
        whose: list[int] = []
        first = 0
        for chunk in chunks:
            if isinstance(chunk, Coded):
                contents += torch.split(chunk.content, chunk.sizes.tolist())
                whose += [indices[first + row] for row in chunk.rows.tolist()]
            first += _count(chunk)

        def again(number: int) -> Tensor:
            return self._jobs.whole(whose[number], contents[number])  # type: ignore[attr-defined, no-any-return]

        return nvjpeg.decode_on_device(contents, self._device, again) if contents else []

    def close(self) -> None:
        """End the thread and the loader processes; a later call starts new ones."""
        if self._running is not None:
            self._running.close()
        super().close()


def _count(chunk: Tensor | Coded) -> int:
    """Count the images of a chunk."""
    return len(chunk.rows) + len(chunk.pixels) if isinstance(chunk, Coded) else len(chunk)


def _grouped(chunks: list[Any]) -> Iterator[list[Any]]:
    """Yield chunks that are decoded at once: a few hundred images, or one chunk that is larger."""
    group: list[Any] = []
    for chunk in chunks:
        if group and sum(map(_count, group)) + _count(chunk) > _TOGETHER:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _as_it_is(view: View) -> Finish:
    return lambda inputs, indices, epoch: inputs
