"""Pillow, with `draft`: a JPEG is decoded at a half, a quarter or an eighth of its size where that covers the crop."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from bigstep.data.decode import cut, cut_fast
from bigstep.data.decoders.base import Buffer, Crop, Draw, Files
from bigstep.data.waits import Spent

__all__ = ["cut_one", "load"]


def load(files: Files, indices: list[int], draw: Draw) -> tuple[Tensor, Spent]:
    """Decode a chunk, image by image."""
    began = time.perf_counter()
    contents = [files.content(index) for index in indices]
    read = time.perf_counter()
    crops = draw([files.size(index, content) for index, content in zip(indices, contents, strict=True)])
    width, height = crops.shape
    out = torch.empty(len(indices), height, width, 3, dtype=torch.uint8)
    for row, (index, content) in enumerate(zip(indices, contents, strict=True)):
        out[row] = cut_one(files, index, content, crops.of(row))
    return out.permute(0, 3, 1, 2), Spent(read - began, time.perf_counter() - read)


def cut_one(files: Files, index: int, content: Buffer, crop: Crop) -> Tensor:
    """Decode what a crop needs of one image, as HWC."""
    with files.open(index, content) as image:
        if crop.snapped:
            return cut_fast(image, crop.box, crop.shape)
        return torch.from_numpy(cut(image, crop.box, crop.shape).copy())
