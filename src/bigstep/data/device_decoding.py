"""Feeding images that the device decodes: others read, a thread lets the device decode, cut and normalise.

Batches are made ready in a stream of their own, ahead of what is computed. Where the device decodes all, a few threads
read, many files in one go and without Python's lock, and nothing has to travel between processes. Where loader
processes decode a part of the chunks (`both`), they read, and one kernel takes what they cut and what the device
decoded alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bigstep.data.augment import mirrored
from bigstep.data.background import in_background, in_threads
from bigstep.data.decoders import nvjpeg
from bigstep.data.decoders.base import Coded
from bigstep.data.decoders.share import Share
from bigstep.data.decoders.turbo import hear_of_read_only_memory
from bigstep.data.device_memory import move_indices
from bigstep.data.loaders import Batch, Chunk, Finish, Job, Loaded, Loaders
from bigstep.data.view import Request, View
from bigstep.gpu.crops import Parts, crop_batch

__all__ = ["DeviceDecoding", "Normal", "ReadByThreads"]

_AHEAD = 3  # batches of training that may be ready before they are taken: 0.6 MB an image of 224 x 224 in float32
_TOGETHER = 256  # images that the device decodes at once: what bounds its memory, 0.6 MB each at 500 x 375
_READERS = 8  # threads at most: from the page cache one brings 20,000 files a second; a slow disk takes more
_READ_AHEAD = 2  # chunks that are read before they are needed, beside those that the threads are at
_ROOM = _TOGETHER * 160_000  # bytes that the files of a chunk are read into, over and over; of larger ones, the first


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

    def _decoded(self, loaded: Generator[Loaded]) -> Generator[Batch]:
        """Yield batches in a stream of their own; this runs in a thread."""
        with contextlib.closing(loaded):
            yield from self._each_decoded(loaded)

    def _each_decoded(self, loaded: Generator[Loaded]) -> Generator[Batch]:
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
                targets = move_indices(torch.cat([chunk[1] for chunk in chunks]), self._device)
                indices = move_indices(request.indices, self._device)
                ready = self.waits.now()
            done = time.perf_counter()
            self.waits.device_s += done - began
            self._share.heed(began - asked, done - began, starving=self._waiting)
            yield Batch(request.epoch, inputs, targets, indices, ready)
            taken = time.perf_counter() - done
            self.waits.worked(images=len(request.indices), files=began - asked, batch=done - began, taken=taken)

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
            launched = time.perf_counter()
            crop_batch(images, Parts(boxes, bounds, turned[begin:end]), out[begin:end], *self._normal)
            self.waits.worked(launch=time.perf_counter() - launched)
            self._done_with(group)
            begin = end
        assert begin == len(out), "every row of a batch is in one chunk"
        return out

    def _done_with(self, chunks: list[Tensor | Coded]) -> None:
        """Hear that chunks were decoded and may be let go."""

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
            if not len(chunk.pixels):
                images += itertools.islice(decoded, len(chunk.rows))
                continue
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
                contents += chunk.files
                whose += [indices[first + row] for row in chunk.rows.tolist()]
            first += _count(chunk)

        def again(number: int) -> Tensor:
            return self._jobs.whole(whose[number], contents[number])  # type: ignore[attr-defined, no-any-return]

        began = time.perf_counter()
        decoded = nvjpeg.decode_on_device(contents, self._device, again) if contents else []
        self.waits.worked(decode=time.perf_counter() - began)
        return decoded

    def close(self) -> None:
        """End the thread and the loader processes; a later call starts new ones."""
        if self._running is not None:
            self._running.close()
        super().close()


class ReadByThreads(DeviceDecoding):
    """Yield batches of coded images that threads of this process read and the device decodes, all of them."""

    chunk = _TOGETHER

    def __init__(self, view: View, jobs: Any, normal: Normal, name: str) -> None:
        super().__init__(dataclasses.replace(view, loaders=0), jobs, normal, name)  # no processes
        self._readers = min(max(view.loaders, 1), _READERS)
        self._rooms: deque[memoryview] = deque()  # those that are free: memory that is new costs more than to read
        hear_of_read_only_memory()

    @property
    def loaders(self) -> int:
        """Threads that read."""
        return self._readers

    def _started(self) -> Generator[Chunk]:
        ahead = self._readers + _READ_AHEAD
        return in_threads(self._read, self.jobs(), threads=self._readers, ahead=ahead)

    def _gathered(self, chunks: Iterator[Any], turn: int) -> Generator[Loaded]:
        with contextlib.closing(chunks):  # type: ignore[type-var]  # those of `_started`
            yield from super()._gathered(chunks, turn)

    def _read(self, job: Job) -> Chunk:
        try:
            room = self._rooms.pop()
        except IndexError:
            room = np.empty(_ROOM, dtype=np.uint8).data
        return self._jobs.read(job, room)  # type: ignore[attr-defined, no-any-return]

    def _done_with(self, chunks: list[Tensor | Coded]) -> None:
        self._rooms += [chunk.room for chunk in chunks if isinstance(chunk, Coded) and chunk.room is not None]


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
