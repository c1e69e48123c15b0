"""Several nvJPEG decoders that share each batch, and the test that they must pass before a run trusts them."""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bigstep.data.decoders.nvjpeg_library import Decoder, Library, RefusedError, Sizes

__all__ = ["Decoders", "find_library", "open_decoders", "why_not_library"]

_FEW = 16  # images for each decoder, at least, where several share a batch
_ALIKE = 2.0  # mean difference from Pillow's pixels, in grey levels, up to which a decoder is trusted
_ROUNDS = 4  # of the test: every buffer is used, and one of them twice
_SIZES = ((500, 375), (257, 191), (96, 128), (333, 66))
_TRIED: tuple[dict[str, Any], ...] = ({}, {"smooth": False}, {"smooth": False, "reserve": None})
"""Options of `Decoder`, the best first; older libraries refuse some."""


class Decoders:
    """Some decoders that share each batch, each in a thread of its own: while one waits for the GPU, another computes.

    Args:
        library: nvJPEG.
        device: where images are decoded.
        count: of decoders.
        options: as for `Decoder`.
    """

    def __init__(self, library: Library, device: torch.device, count: int = 2, **options: Any) -> None:
        self._device = device
        self._decoders = [Decoder(library, device, **options) for _ in range(count)]
        self._threads = [ThreadPoolExecutor(1, "nvjpeg") for _ in range(count)]

    def begin(self, contents: Sequence[Tensor], sizes: Sizes) -> Callable[[], list[Tensor]]:
        """Begin to decode files; return a function that waits for the images, which `Decoder.decode` describes.

        They are read on the stream that is current now; the work that reads them must be queued before the next call
        but one. A `RefusedError` means that none of them is returned.
        """
        reader = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        parts = min(max(len(contents) // _FEW, 1), len(self._decoders))
        edges = [len(contents) * part // parts for part in range(parts + 1)]
        work: list[Future[list[Tensor]]] = [
            self._threads[part].submit(self._decoders[part].decode, contents[a:b], sizes[a:b], reader)
            for part, (a, b) in enumerate(zip(edges, edges[1:], strict=False))
        ]

        def finish() -> list[Tensor]:
            wait(work)  # for all of them, even if one fails: they read `contents`
            return [image for part in work for image in part.result()]

        return finish

    def decode(self, contents: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """Decode files and wait for the images."""
        return self.begin(contents, sizes)()

    def close(self) -> None:
        """Wait for what is under way, and free what the library holds."""
        for thread in self._threads:
            thread.shutdown()
        for decoder in self._decoders:
            decoder.close()


def open_decoders(device: torch.device, count: int = 2) -> Decoders:
    """Return decoders for a device for which `why_not_library` returned None."""
    library, options = _trusted(device)
    return Decoders(library, device, count, **options)


def why_not_library(device: torch.device) -> str | None:
    """Return why nvJPEG cannot be called directly, or None; it is tried once for each device."""
    try:
        _trusted(device)
    except RefusedError as error:
        return str(error)
    return None


def find_library() -> Library:
    """Return the library that torchvision has loaded, or one that comes with torch, or the system's."""
    for path in _paths():
        with contextlib.suppress(OSError, AttributeError):  # it cannot be loaded, or is too old
            return Library(path)
    raise RefusedError("there is no libnvjpeg beside torch or torchvision, or on the system")


def _paths() -> Iterator[str]:
    with contextlib.suppress(Exception):  # torchvision is missing, or belongs to another torch
        import torchvision.io  # noqa: F401 - loads it
    with contextlib.suppress(OSError):  # not Linux
        lines = Path("/proc/self/maps").read_text().splitlines()
        names = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
        yield from sorted(name for name in names if Path(name).name.startswith("libnvjpeg."))
    version = str(torch.version.cuda).partition(".")[0]
    packages = Path(torch.__file__).parents[1]
    yield from map(str, sorted(packages.glob(f"nvidia/*/lib/libnvjpeg.so.{version}")))
    if found := ctypes.util.find_library("nvjpeg"):
        yield found


@functools.cache
def _outcome(device: torch.device) -> tuple[Library, dict[str, Any]] | str:
    if device.type != "cuda":
        return "there is no GPU"
    try:
        library = find_library()
    except RefusedError as error:
        return str(error)
    why = ""
    for options in _TRIED:
        found = try_out(library, device, options)
        if found is None:
            return library, options
        why = why or found
    return why


def _trusted(device: torch.device) -> tuple[Library, dict[str, Any]]:
    found = _outcome(device)
    if isinstance(found, str):
        raise RefusedError(found)
    return found


def try_out(library: Library, device: torch.device, options: dict[str, Any]) -> str | None:
    """Decode some images, round after round; return what is wrong with them, or None."""
    try:
        decoders = Decoders(library, device, **options)
    except RuntimeError as error:
        return f"nvJPEG does not start ({error})"
    try:
        return difference_from_pillow(decoders.decode)
    except RuntimeError as error:
        return f"nvJPEG fails on a test image ({error})"
    finally:
        decoders.close()


def difference_from_pillow(
    decode: Callable[[Sequence[Tensor], Sequence[tuple[int, int]]], Sequence[Tensor]],
) -> str | None:
    """Say by how much a decoder's images differ from Pillow's; None if by no more than `_ALIKE`."""
    samples = [_sample(size, sampling) for size in _SIZES for sampling in (0, 2)] * (2 * _FEW // (2 * len(_SIZES)) + 1)
    for turn in range(_ROUNDS):
        turned = samples[turn:] + samples[:turn]
        contents = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content, _ in turned]
        images = decode(contents, [(pixels.shape[2], pixels.shape[1]) for _, pixels in turned])
        for image, (_, pixels) in zip(images, turned, strict=True):
            off = (image.cpu().float() - pixels.float()).abs().mean().item()
            if off > _ALIKE:
                return f"its pixels of a test image are off by {off:.1f} grey levels"
    return None


@functools.cache
def _sample(size: tuple[int, int], sampling: int) -> tuple[bytes, Tensor]:
    """Return a smooth picture as a JPEG file, and the pixels that Pillow decodes from it."""
    width, height = size
    x, y = np.meshgrid(np.arange(width) / 80, np.arange(height) / 80)
    waves = [np.sin(x + colour) * np.cos((1 + colour) * y / 2) for colour in range(3)]
    content = io.BytesIO()
    picture = Image.fromarray((127.5 + 120 * np.stack(waves, 2)).astype(np.uint8))
    picture.save(content, "JPEG", quality=92, subsampling=sampling)
    pixels = np.array(Image.open(io.BytesIO(content.getvalue())))
    return content.getvalue(), torch.from_numpy(pixels).permute(2, 0, 1)
