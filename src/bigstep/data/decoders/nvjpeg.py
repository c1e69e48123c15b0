"""nvJPEG through torchvision: the CPU reads files and headers, the GPU's own decoders do the rest.

The hardware decoders do not wait for the stream that they are given. They write into memory as soon as torch allocates
it, and torch allocates memory that work queued on a stream still reads: results are then overwritten while they are
read (pytorch/vision, pull request 9606). So the stream that cuts the crops is synchronized before each call of the
decoder. All decoded images are allocated on that stream, so memory that is allocated again has no reader left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigstep.data.decode import snap_all
from bigstep.data.decoders.base import Coded, Crops, Draw, Files, Mixed
from bigstep.data.decoders.pillow import cut_one
from bigstep.data.decoders.plain import read_chunk
from bigstep.data.decoders.turbo import as_tensor, cut_plain, jpeg_decoder
from bigstep.data.waits import Spent

__all__ = ["decode_on_device", "read", "why_not_nvjpeg", "why_not_torchvision"]


def read(files: Files, indices: list[int], draw: Draw, how: Mixed, room: memoryview) -> tuple[Coded, Spent]:
    """Read a chunk, into `room` as far as it fits; images that are not for the device are decoded and cut here.

    Files that are not plain JPEGs are left to Pillow. Of the others, the device gets the first ones.
    """
    began = time.perf_counter()
    contents, sizes, plain, read_s = read_chunk(files, indices, room)
    crops = draw(sizes)
    rows = [row for row, is_plain in enumerate(plain) if is_plain]
    rows = rows[: round(how.share * len(rows))]
    others = sorted({*range(len(indices))} - {*rows})
    width, height = crops.shape
    pixels = torch.empty(len(others), height, width, 3, dtype=torch.uint8, pin_memory=how.pinned and len(others) > 0)
    for place, row in enumerate(others):
        cropped = cut_plain(contents[row], crops.of(row)) if plain[row] and how.by == "torchvision" else None
        pixels[place] = cut_one(files, indices[row], contents[row], crops.of(row)) if cropped is None else cropped
    shapes = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    coded = Coded(
        pixels,
        [as_tensor(contents[row]) for row in rows],
        shapes[rows],
        np.array(rows, dtype=np.int64),
        *_parts(crops, shapes, rows),
        room,
    )
    return coded, Spent(read_s, time.perf_counter() - began - read_s)


def _parts(crops: Crops, sizes: NDArray[np.int64], rows: list[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return boxes and bounds of some images as the crop kernel takes them: those that `cut_fast` and `cut` use."""
    boxes, sizes = crops.boxes[rows], sizes[rows]
    bounds = snap_all(boxes, sizes) if crops.snapped else np.concatenate([np.zeros_like(sizes), sizes], 1)
    if crops.snapped:
        boxes = bounds.astype(np.float64)
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1), bounds


def decode_on_device(
    contents: Sequence[Tensor], device: torch.device, again: Callable[[int], Tensor]
) -> Sequence[Tensor]:
    """Decode files on the device; return uint8 images of (3, height, width), allocated on the current stream.

    Args:
        contents: The bytes of each file, on the CPU.
        device: A CUDA device.
        again: Decodes the file of this number on the CPU, or raises a `DataError` that names it.
    """
    decode_jpeg, rgb = jpeg_decoder()
    torch.cuda.current_stream(device).synchronize()  # see above: memory allocated from now on has no reader
    try:
        decoded: list[Tensor] = decode_jpeg(list(contents), mode=rgb, device=device)
        return decoded
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
    if len(contents) == 1:
        return [again(0).to(device)]
    half = len(contents) // 2  # torchvision does not tell which file failed
    first = decode_on_device(contents[:half], device, again)
    return [*first, *decode_on_device(contents[half:], device, lambda number: again(half + number))]


def why_not_nvjpeg(device: torch.device) -> str | None:
    """Return why the GPU's decoders cannot be used, or None."""
    from bigstep.gpu.backend import why_not_triton

    if device.type != "cuda":
        return "there is no GPU"
    if reason := why_not_triton(torch.empty(0, device=device)):
        return reason
    return why_not_torchvision()


def why_not_torchvision() -> str | None:
    """Return why torchvision cannot be used, or None; a release that does not match torch's can fail in any way."""
    try:
        jpeg_decoder()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            return "torchvision is not installed"
        return f"torchvision does not match this torch ({type(error).__name__})"
    return None
