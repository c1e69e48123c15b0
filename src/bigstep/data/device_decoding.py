"""Feeding images that the device decodes: threads read, and one more has the device decode, cut and normalise.

Batches are prepared in a stream of their own, ahead of the computation. Many files are read in one go, without Python's
lock, and nothing has to be sent between processes. Where cores help to decode (`both`), the reading threads decode and
cut some images of each chunk, and one kernel takes these and the ones that the device decoded alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bigstep.data.augment import mirrored
from bigstep.data.background import in_background, in_threads
from bigstep.data.decoders.base import Coded, Mixed
from bigstep.data.decoders.on_device import OnDevice
from bigstep.data.decoders.share import Share
from bigstep.data.decoders.turbo import hear_of_read_only_memory
from bigstep.data.device_memory import move_indices
from bigstep.data.loaders import Batch, Chunk, Finish, Job, Loaded, Loaders, one_ahead
from bigstep.data.view import Request, View
from bigstep.gpu.crops import Parts, crop_batch

__all__ = ["DeviceDecoding", "Normal"]

_AHEAD = 3  # training batches that may be ready before they are taken: 0.6 MB per image of 224 x 224 in float32
_TOGETHER = 256  # images that the device decodes at once, which bounds its memory: 0.6 MB each at 500 x 375
_READERS = 8  # threads that only read, at most: one reads 20,000 files a second from memory; a slow disk needs more
_READ_AHEAD = 2  # chunks that are read before they are needed, besides those that the threads are working on
_ROOM = 160_000  # bytes of reused memory for each file of a chunk; files that do not fit get memory of their own


class Normal(NamedTuple):
    """Mean and deviation by which the pixels of a source are normalised."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class _Group(NamedTuple):
    """Chunks of a batch that are decoded together."""

    request: Request
    targets: Tensor
    """Of the whole batch."""
    chunks: list[Coded]
    first: int
    """The row of the batch at which they begin."""
    files_s: float
    """Seconds spent waiting for files."""
    decoded: Callable[[], Sequence[Tensor]]
    """Waits for the images."""


class DeviceDecoding(Loaders):
    """Yield batches of coded images, all or some of which the device decodes.

    Args:
        view: how the samples are wanted; its `decoding` says who decodes.
        jobs: reads a chunk and decodes a part of it, in a thread; its `whole` decodes one image on the CPU.
        normal: mean and deviation of the source.
        name: of the source, for messages.
    """

    def __init__(self, view: View, jobs: Any, normal: Normal, name: str) -> None:
        alone = view.decoding.name == "nvjpeg"
        self._share = Share(1.0 if alone else view.decoding.share, least=view.decoding.least, fixed=alone)
        self._threads = max(min(view.loaders, _READERS) if alone else view.loaders, 1)
        self.chunk = _TOGETHER if alone else _TOGETHER // 4  # the cores share a batch
        self._rooms: deque[memoryview] = deque()  # free ones: fresh memory costs more time than reading
        self._idle: deque[OnDevice] = deque()  # decoders that no iteration is using
        self._normal = normal
        self._waiting = False  # whether the consumer waits for a batch right now
        self._running: Generator[Batch] | None = None
        hear_of_read_only_memory()
        super().__init__(dataclasses.replace(view, loaders=0), jobs, _as_it_is, name)  # no processes

    @property
    def loaders(self) -> int:
        """Threads that read, and that decode what the device does not."""
        return self._threads

    @property
    def share(self) -> float:
        """The part of the images that the device decodes at present."""
        return self._share.value

    def _started(self) -> Generator[Chunk]:
        ahead = self._threads + _READ_AHEAD
        return in_threads(self._read, self.jobs(), threads=self._threads, ahead=ahead, first=_on_one_core)

    def _gathered(self, chunks: Iterator[Any], turn: int) -> Generator[Loaded]:
        with contextlib.closing(chunks):  # type: ignore[type-var]  # those of `_started`
            yield from super()._gathered(chunks, turn)

    def _read(self, job: Job) -> Chunk:
        try:
            room = self._rooms.pop()
        except IndexError:
            room = _new_room(_ROOM * self.chunk)
        how = Mixed(self.share, self._view.decoding.loaders_use, pinned=self._device.type == "cuda")
        return self._jobs.read(job, how, room)  # type: ignore[attr-defined, no-any-return]

    def _arriving(self, requests: Iterable[Request]) -> Generator[Batch]:
        """Yield batches that a thread has prepared."""
        ahead = _AHEAD if self._view.train else _AHEAD - 1  # batches of an evaluation are larger
        batches = self._running = in_background(self._decoded(self._loaded(requests)), ahead)
        with contextlib.closing(batches):
            while True:
                self._waiting = True
                batch = next(batches, None)
                self._waiting = False
                if batch is None:
                    return
                yield batch

    def _decoded(self, loaded: Generator[Loaded]) -> Generator[Batch]:
        """Prepare batches in a stream of their own; this runs in a thread that has the decoder to itself."""
        with contextlib.closing(loaded):
            decoder = self._idle.pop() if self._idle else OnDevice(self._device)
            try:
                yield from self._each_decoded(loaded, decoder)
            finally:
                self._idle.append(decoder)

    def _each_decoded(self, loaded: Generator[Loaded], decoder: OnDevice) -> Generator[Batch]:
        cuda = self._device.type == "cuda"
        # ahead of the kernels of a step: the few blocks of a kernel here must not wait for all of theirs
        stream = torch.cuda.Stream(self._device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]  # untyped in torch
        files_s = batch_s = 0.0
        for group in one_ahead(self._begun(loaded, decoder, stream)):  # while these are cut, the next are decoded
            began, request = time.perf_counter(), group.request
            with _on(stream):
                if not group.first:
                    out = self._out(request)
                self._cut(group, out)
                files_s, batch_s = files_s + group.files_s, batch_s + time.perf_counter() - began
                if group.first + sum(map(_count, group.chunks)) < len(out):
                    continue
                targets = move_indices(group.targets, self._device)
                indices = move_indices(request.indices, self._device)
                ready = self.waits.now()
            done = time.perf_counter()
            self.waits.device_s += batch_s
            starving = self._waiting and self.waits.idle()
            self._share.heed(len(out), files_s, batch_s, starving=starving)
            yield Batch(request.epoch, out, targets, indices, ready)
            taken = time.perf_counter() - done
            self.waits.worked(images=len(out), files=files_s, batch=batch_s, taken=taken)
            files_s = batch_s = 0.0

    def _begun(
        self, loaded: Generator[Loaded], decoder: OnDevice, stream: torch.cuda.Stream | None
    ) -> Generator[_Group]:
        """Yield group after group of images, each as soon as the device has begun to decode it."""
        while True:
            asked = time.perf_counter()
            found = next(loaded, None)
            if found is None:
                return
            request, chunks = found
            waited, first = time.perf_counter() - asked, 0
            targets = torch.cat([chunk[1] for chunk in chunks])
            for group in _grouped([chunk[0] for chunk in chunks]):
                with _on(stream):
                    decoded = self._begin(decoder, group, request.indices[first:].tolist())
                yield _Group(request, targets, group, first, waited, decoded)
                waited, first = 0.0, first + sum(map(_count, group))
            assert first == len(request.indices), "every row of a batch is in one chunk"

    def _begin(self, decoder: OnDevice, chunks: list[Coded], indices: list[int]) -> Callable[[], Sequence[Tensor]]:
        """Have the device begin to decode the files of these chunks."""
        contents: list[Tensor] = []
        whose: list[int] = []
        first = 0
        for chunk in chunks:
            contents += chunk.files
            whose += [indices[first + row] for row in chunk.rows.tolist()]
            first += _count(chunk)

        def again(number: int) -> Tensor:
            return self._jobs.whole(whose[number], contents[number])  # type: ignore[attr-defined, no-any-return]

        return decoder.begin(contents, np.concatenate([chunk.sizes for chunk in chunks]), again)

    def _out(self, request: Request) -> Tensor:
        """Return memory for the crops of a batch."""
        width, height = self._jobs.look(request, self._view).shape
        layout = torch.channels_last if self._device.type == "cuda" else torch.contiguous_format
        shape = (len(request.indices), 3, height, width)
        return torch.empty(shape, dtype=self._view.dtype, device=self._device, memory_format=layout)

    def _cut(self, group: _Group, out: Tensor) -> None:
        """Cut, mirror and normalise images into their rows of a batch."""
        images, boxes, bounds = self._images(group, (out.shape[3], out.shape[2]))
        rows = slice(group.first, group.first + len(images))
        turned = torch.zeros(len(images), dtype=torch.bool)
        if self._view.kind in ("flip", "resized_crop"):
            turned = mirrored(group.request.indices[rows], self._view.seed, group.request.epoch)
        launched = time.perf_counter()
        crop_batch(images, Parts(boxes, bounds, turned), out[rows], *self._normal)
        self.waits.worked(launch=time.perf_counter() - launched)
        self._rooms += [chunk.room for chunk in group.chunks]

    def _images(self, group: _Group, shape: tuple[int, int]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return images on the device, with their boxes and the bounds within which their pixels may be read."""
        began = time.perf_counter()
        decoded = iter(group.decoded())  # first, while nothing of this group is queued in this stream
        self.waits.worked(decode=time.perf_counter() - began)
        images: list[Tensor] = []
        boxes = torch.tensor([0, 0, *shape], dtype=torch.float64).repeat(sum(map(_count, group.chunks)), 1)
        bounds = boxes.long()
        for chunk in group.chunks:
            places = torch.from_numpy(len(images) + chunk.rows)
            boxes[places], bounds[places] = torch.from_numpy(chunk.boxes), torch.from_numpy(chunk.bounds)
            if not len(chunk.pixels):
                images += itertools.islice(decoded, len(chunk.rows))
                continue
            cut = iter(chunk.pixels.to(self._device, non_blocking=True).permute(0, 3, 1, 2).unbind(0))
            coded = set(chunk.rows.tolist())
            images += [next(decoded if row in coded else cut) for row in range(_count(chunk))]
        return images, boxes, bounds

    def close(self) -> None:
        """End the threads; a later call starts new ones."""
        if self._running is not None:
            self._running.close()
        while self._idle:
            self._idle.pop().close()
        super().close()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _new_room(size: int) -> memoryview:
    return np.empty(size, dtype=np.uint8).data


def _on_one_core() -> None:
    """Keep torch from using more threads to copy and resize an image: as many threads as cores do this already."""
    torch.set_num_threads(1)


def _count(chunk: Coded) -> int:
    """Count the images of a chunk."""
    return len(chunk.rows) + len(chunk.pixels)


def _grouped(chunks: list[Coded]) -> Iterator[list[Coded]]:
    """Yield groups of chunks to decode together: a few hundred images."""
    group: list[Coded] = []
    for chunk in chunks:
        if group and sum(map(_count, group)) + _count(chunk) > _TOGETHER:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _as_it_is(view: View) -> Finish:
    return lambda inputs, indices, epoch: inputs
