"""nvJPEG itself, without torchvision: a decoder with a stream of higher priority than the step's, and its own memory.

torchvision's decoder has a stream of ordinary priority: its many small kernels queue behind those of a training step.

The hardware decoders do not wait for streams. So they write into buffers of their own, and the host waits for an event
on the reader's stream before a buffer is written again.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Decoder", "Library", "RefusedError", "Sizes"]

_HARDWARE = 3  # of nvjpegBackend_t
_RGB = 3  # of nvjpegOutputFormat_t: a plane for each colour
_FULL_COLOUR = 0  # of nvjpegChromaSubsampling_t: 4:4:4
_SMOOTH = 32  # NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION, from 12.1 on: chroma is upsampled as libjpeg does it
_ALIGNED = 16  # bytes: rows of a plane begin at multiples
_BUFFERS = 3
Sizes = Sequence[tuple[int, int]] | NDArray[np.int64]
"""Width and height of each image in pixels."""
_DESTINATION = np.dtype([("channel", np.int64, 4), ("pitch", np.int64, 4)])
"""nvjpegImage_t; addresses and sizes of memory are below 2 ** 63."""

_QUICK = ("nvjpegJpegStreamParseHeader", "nvjpegJpegStreamGetFrameDimensions", "nvjpegDecodeBatchedSupported")
"""Called without releasing Python's lock: they take a microsecond per image, and getting it back may take longer."""
_P, _I = ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvjpegCreateEx": (_I, _P, _P, ctypes.c_uint, _P),
    "nvjpegDestroy": (_P,),
    "nvjpegJpegStateCreate": (_P, _P),
    "nvjpegJpegStateDestroy": (_P,),
    "nvjpegJpegStreamCreate": (_P, _P),
    "nvjpegJpegStreamDestroy": (_P,),
    "nvjpegJpegStreamParseHeader": (_P, _P, ctypes.c_size_t, _P),
    "nvjpegJpegStreamGetFrameDimensions": (_P, _P, _P),
    "nvjpegDecodeBatchedSupported": (_P, _P, _P),
    "nvjpegDecodeBatchedPreAllocate": (_P, _P, _I, _I, _I, _I, _I),
    "nvjpegDecodeBatchedInitialize": (_P, _P, _I, _I, _I),
    "nvjpegDecodeBatched": (_P, _P, _P, _P, _P, _P),
}


class RefusedError(RuntimeError):
    """The library did not decode these files; another decoder may."""


class Library:
    """The functions of libnvjpeg that are used here; a status other than 0 is an error.

    Args:
        path: of the shared library, or its name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        library, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        for name, kinds in _SIGNATURES.items():
            function = getattr(quick if name in _QUICK else library, name)
            function.argtypes, function.restype = kinds, _I
            setattr(self, name, function)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by its name."""
        if status := getattr(self, name)(*arguments):
            raise RefusedError(f"{name} returned status {status}")


@dataclass
class _Buffer:
    """Memory that images are decoded into."""

    pixels: Tensor
    reader: torch.cuda.Stream | None = None
    """The stream on which the images are read."""
    read: torch.cuda.Event | None = None
    """Passes when they have been read."""


class Decoder:
    """One decoder, with a stream and buffers of its own; at most one thread uses it at a time.

    Args:
        library: nvJPEG.
        device: where images are decoded; on a CPU, for tests, there is no stream to wait for.
        smooth: Upsample chroma as libjpeg does, if the library can.
        reserve: Width and height of images that the library reserves memory for, whenever the number of images in a
            batch changes. With (1, 1) it keeps what it has once needed, with None it decides by itself.
        priority: of the stream; the step's has 0, and lower numbers go first.
    """

    def __init__(
        self,
        library: Library,
        device: torch.device,
        *,
        smooth: bool = True,
        reserve: tuple[int, int] | None = (1, 1),
        priority: int = -1,
    ) -> None:
        self._library, self._device, self._reserve = library, device, reserve
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=priority) if cuda else None  # type: ignore[no-untyped-call]
        self._buffers = [_Buffer(torch.empty(0, dtype=torch.uint8, device=device)) for _ in range(_BUFFERS)]
        self._calls = 0
        self._ready_for = 0  # images
        self._handle, self._state, self._header = _P(), _P(), _P()
        with self._current():
            flags = _SMOOTH if smooth else 0
            library.call("nvjpegCreateEx", _HARDWARE, None, None, flags, ctypes.byref(self._handle))
            library.call("nvjpegJpegStateCreate", self._handle, ctypes.byref(self._state))
            library.call("nvjpegJpegStreamCreate", self._handle, ctypes.byref(self._header))

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Make the device current in this thread: handles and states are bound to it."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def decode(self, contents: Sequence[Tensor], sizes: Sizes, reader: torch.cuda.Stream | None = None) -> list[Tensor]:
        """Decode files and wait until that is done; return images of (3, height, width) in memory that is reused.

        The work that reads them must be queued on the reader's stream before the next call but one.

        Args:
            contents: The bytes of each file, on the CPU; they may be overwritten afterwards.
            sizes: Width and height of each image, as its header says.
            reader: The stream that reads the images; the current one if not given.
        """
        if self._stream is not None and reader is None:
            reader = torch.cuda.current_stream(self._device)
        with self._current():
            return self._decode(contents, np.array(sizes, dtype=np.int64).reshape(-1, 2), reader)

    def _decode(
        self, contents: Sequence[Tensor], sizes: NDArray[np.int64], reader: torch.cuda.Stream | None
    ) -> list[Tensor]:
        count = len(contents)
        pitches = -(-sizes[:, 0] // _ALIGNED) * _ALIGNED
        planes = pitches * sizes[:, 1]
        ends = np.cumsum(3 * planes)
        begins = ends - 3 * planes
        pointers = np.fromiter((content.data_ptr() for content in contents), np.int64, count)
        lengths = np.fromiter((content.numel() for content in contents), np.int64, count)
        self._check(pointers, lengths, sizes)
        pixels = self._next_buffer(int(ends[-1]) if count else 0, reader)
        into = np.zeros(count, _DESTINATION)
        starts = begins + pixels.data_ptr()
        into["channel"][:, :3] = np.stack([starts, starts + planes, starts + 2 * planes], 1)
        into["pitch"][:, :3] = pitches[:, None]
        self._submit(pointers, lengths, into)
        done = _mark(self._stream)
        places = zip(sizes.tolist(), planes.tolist(), pitches.tolist(), begins.tolist(), strict=True)
        images = [pixels.as_strided((3, h, w), (plane, pitch, 1), at) for (w, h), plane, pitch, at in places]
        _wait(done)  # for this stream alone: the reader's may still have to cut the batch before
        return images

    def _check(self, pointers: NDArray[np.int64], lengths: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Refuse files that the hardware decoders cannot take, or whose size is not the one that was told."""
        heads = np.zeros((len(pointers), 3), dtype=np.int32)  # 0 if the hardware takes it, width and height
        at, call, handle, header = heads.ctypes.data, self._library.call, self._handle, self._header
        for pointer, length in zip(pointers.tolist(), lengths.tolist(), strict=True):
            call("nvjpegJpegStreamParseHeader", handle, pointer, length, header)
            call("nvjpegDecodeBatchedSupported", handle, header, at)
            call("nvjpegJpegStreamGetFrameDimensions", header, at + 4, at + 8)
            at += heads.strides[0]
        if heads[:, 0].any():
            raise RefusedError("a file is not for the chip's decoders")
        if (heads[:, 1:] != sizes).any():
            raise RefusedError("a file is of another size than was told")

    def _next_buffer(self, size: int, reader: torch.cuda.Stream | None) -> Tensor:
        """Return a buffer that no queued work reads any more."""
        last_but_one = self._buffers[(self._calls - 2) % _BUFFERS]
        last_but_one.read = _mark(last_but_one.reader)
        buffer = self._buffers[self._calls % _BUFFERS]
        _wait(buffer.read)
        self._calls += 1
        buffer.reader, buffer.read = reader, None
        if len(buffer.pixels) < size:
            buffer.pixels = torch.empty(0, dtype=torch.uint8, device=self._device)  # frees the old one first
            buffer.pixels = torch.empty(size + size // 8, dtype=torch.uint8, device=self._device)
            _wait(_mark(self._stream))  # torch may allocate memory that queued work still uses
        return buffer.pixels

    def _submit(self, pointers: NDArray[np.int64], lengths: NDArray[np.int64], into: NDArray[np.void]) -> None:
        call, handle, state, count = self._library.call, self._handle, self._state, len(into)
        if not count:
            return
        stream = 0 if self._stream is None else self._stream.cuda_stream
        try:
            if count != self._ready_for:
                if self._reserve is not None:
                    call("nvjpegDecodeBatchedPreAllocate", handle, state, count, *self._reserve, _FULL_COLOUR, _RGB)
                call("nvjpegDecodeBatchedInitialize", handle, state, count, 1, _RGB)
                self._ready_for = count
            tables = (array.ctypes.data for array in (pointers, lengths, into))
            call("nvjpegDecodeBatched", handle, state, *tables, stream)
        except RefusedError:
            self._ready_for = 0  # the state has to be initialised again
            _wait(_mark(self._stream))
            raise

    def close(self) -> None:
        """Free what the library holds, which otherwise stays until the process ends; nothing may be decoded after."""
        with self._current():
            for stream in (self._stream, *(buffer.reader for buffer in self._buffers)):
                _wait(_mark(stream))
            self._library.call("nvjpegJpegStreamDestroy", self._header)
            self._library.call("nvjpegJpegStateDestroy", self._state)
            self._library.call("nvjpegDestroy", self._handle)
        self._buffers = []


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Return an event that passes after all work queued on a stream so far."""
    if stream is None:
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # the host sleeps while it waits
    event.record(stream)
    return event


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
