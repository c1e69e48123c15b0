"""torchvision's JPEG decoder on the CPU (libjpeg-turbo), which hands over pixels without a copy in Python."""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from PIL import Image
from torch import Tensor

from bigstep.data.decode import snap
from bigstep.data.decoders.base import Buffer, Crop, Draw, Files
from bigstep.data.decoders.pillow import cut_one
from bigstep.data.decoders.plain import read_chunk
from bigstep.data.waits import Spent

__all__ = ["as_tensor", "cut_plain", "hear_of_read_only_memory", "jpeg_decoder", "load"]


def load(files: Files, indices: list[int], draw: Draw) -> tuple[Tensor, Spent]:
    """Decode a chunk, image by image; files that are not plain JPEGs, or that the decoder refuses, go to Pillow."""
    began = time.perf_counter()
    contents, sizes, plain, read_s = read_chunk(files, indices)
    crops = draw(sizes)
    width, height = crops.shape
    out = torch.empty(len(indices), height, width, 3, dtype=torch.uint8)
    for row, (index, content) in enumerate(zip(indices, contents, strict=True)):
        crop = crops.of(row)
        cropped = cut_plain(content, crop) if plain[row] else None
        out[row] = cut_one(files, index, content, crop) if cropped is None else cropped
    return out.permute(0, 3, 1, 2), Spent(read_s, time.perf_counter() - began - read_s)


def cut_plain(content: Buffer, crop: Crop) -> Tensor | None:
    """Decode and resize the crop, as HWC; None if the decoder refuses the file: Pillow then says what is wrong.

    NumPy slices, because it keeps Python's lock: threads that do this must not release the lock ten times per image.
    """
    decode_jpeg, rgb = jpeg_decoder()
    try:
        pixels = decode_jpeg(as_tensor(content), mode=rgb).numpy().transpose(1, 2, 0)
    except RuntimeError:
        return None
    if not crop.snapped:
        picture = Image.fromarray(np.ascontiguousarray(pixels))
        return torch.from_numpy(np.array(picture.resize(crop.shape, Image.Resampling.BILINEAR, box=crop.box)))
    left, top, right, bottom = snap(crop.box, (pixels.shape[1], pixels.shape[0]))
    part = torch.from_numpy(np.ascontiguousarray(pixels[top:bottom, left:right])[None].transpose(0, 3, 1, 2))
    resized = F.interpolate(part, size=(crop.shape[1], crop.shape[0]), mode="bilinear", antialias=True)
    return torch.from_numpy(resized.numpy()[0].transpose(1, 2, 0))


@functools.cache
def jpeg_decoder() -> tuple[Any, Any]:
    """Return torchvision's function, and its constant for RGB."""
    from torchvision.io import ImageReadMode, decode_jpeg

    # from 0.29 on it recommends torchcodec, which needs a newer torch than we do
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torchvision")
    return decode_jpeg, ImageReadMode.RGB


def as_tensor(content: Buffer) -> Tensor:
    """Return the bytes of a file as a tensor that shares their memory; it is never written to."""
    hear_of_read_only_memory()
    return torch.frombuffer(content, dtype=torch.uint8)


@functools.cache
def hear_of_read_only_memory() -> None:
    """Provoke torch's one warning about read-only memory here, unseen: threads cannot set warning filters safely."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"read only", dtype=torch.uint8)
