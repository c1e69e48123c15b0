"""nvJPEG through torchvision: loader processes read files and headers, the GPU's own decoders do the rest.

The chip's decoders do not wait for the stream that they are given. They write into memory as soon as torch hands it
out, and torch hands out memory that work queued on a stream still reads: results are then overwritten while they are
read (pytorch/vision, pull request 9606). So the stream that cuts the crops is drained before each call of the decoder.
All that is decoded is allocated on that stream, and so nothing that is handed out anew has a reader left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigstep.data.decode import snap
from bigstep.data.decoders.base import Buffer, Coded, Crop, Draw, Files
from bigstep.data.decoders.pillow import cut_one
from bigstep.data.decoders.plain import read_chunk
from bigstep.data.decoders.turbo import jpeg_decoder
from bigstep.data.waits import Spent

__all__ = ["decode_on_device", "load", "why_not_nvjpeg", "why_not_torchvision"]


def load(files: Files, indices: list[int], draw: Draw) -> tuple[Coded, Spent]:
    """Read a chunk; what is no plain JPEG is decoded and cut here, by Pillow."""
    began = time.perf_counter()
    contents, sizes, plain, read_s = read_chunk(files, indices)
    crops = draw(sizes)
    pixels = [
        cut_one(files, index, content, crop)
        for index, content, crop, is_plain in zip(indices, contents, crops, plain, strict=True)
        if not is_plain
    ]
    rows = [row for row, is_plain in enumerate(plain) if is_plain]
    width, height = crops[0].shape
    coded = Coded(
        torch.stack(pixels) if pixels else torch.empty(0, height, width, 3, dtype=torch.uint8),
        _joined([contents[row] for row in rows]),
        np.array([len(contents[row]) for row in rows], dtype=np.int64),
        np.array(rows, dtype=np.int64),
        *_parts([crops[row] for row in rows], [sizes[row] for row in rows]),
    )
    return coded, Spent(read_s, time.perf_counter() - began - read_s)


def _joined(contents: Sequence[Buffer]) -> Tensor:
    """Put files one behind the other."""
    joined = np.empty(sum(map(len, contents)), dtype=np.uint8)
    at = 0
    for content in contents:
        joined[at : at + len(content)] = np.frombuffer(content, dtype=np.uint8)
        at += len(content)
    return torch.from_numpy(joined)


def _parts(crops: list[Crop], sizes: list[tuple[int, int]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return boxes and bounds as the crop kernel takes them: those that `cut_fast` and `cut` look at."""
    boxes, bounds = [], []
    for crop, size in zip(crops, sizes, strict=True):
        box = snap(crop.box, size) if crop.snapped else crop.box
        boxes.append((box[0], box[1], box[2] - box[0], box[3] - box[1]))
        bounds.append(box if crop.snapped else (0, 0, *size))
    return np.array(boxes, dtype=np.float64).reshape(-1, 4), np.array(bounds, dtype=np.int64).reshape(-1, 4)


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
    torch.cuda.current_stream(device).synchronize()  # see above: nothing that torch hands out now is still read
    try:
        decoded: list[Tensor] = decode_jpeg(list(contents), mode=rgb, device=device)
        return decoded
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # torchvision does not tell which file it was
        return [again(number).to(device) for number in range(len(contents))]


def why_not_nvjpeg(device: torch.device) -> str | None:
    """Return why the GPU's decoders cannot be used, or None."""
    from bigstep.gpu.backend import why_not_triton

    if device.type != "cuda":
        return "there is no GPU"
    if reason := why_not_triton(torch.empty(0, device=device)):
        return reason
    return why_not_torchvision()


def why_not_torchvision() -> str | None:
    """Return why torchvision cannot be used, or None; one of another release than torch's fails in its own way."""
    try:
        jpeg_decoder()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            return "torchvision is not installed"
        return f"torchvision does not go with this torch ({type(error).__name__})"
    return None
