"""Crops of a batch of differently sized images: cut, resized with antialiasing, mirrored and normalised in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bigstep.gpu.backend import on_device_of, why_not_triton

__all__ = ["Parts", "crop_batch", "crop_weights"]

BLOCK = 256
"""Most output pixels of one program, all in one row."""


@dataclass(frozen=True)
class Parts:
    """The part of each image to cut out, as tensors on the CPU."""

    boxes: Tensor
    """float64 (N, 4): left, top, width and height in pixels, which may be fractions."""
    bounds: Tensor
    """int64 (N, 4): left, top, right and bottom of the pixels that may be read; the filter is cut off there."""
    mirrored: Tensor
    """bool (N,): whether to swap left and right."""


def crop_batch(
    images: Sequence[Tensor],
    parts: Parts,
    out: Tensor,
    mean: tuple[float, ...] = (0.0, 0.0, 0.0),
    std: tuple[float, ...] = (1.0, 1.0, 1.0),
) -> Tensor:
    """Fill `out` with the part of each image, resized by the triangle filter, as (x / 255 - mean) / std.

    The filter is that of Pillow's and torch's antialiased bilinear resampling: it extends one output pixel to either
    side, or one input pixel where the image is enlarged. Sums are kept in float32; no intermediate value is rounded to
    grey levels.

    Args:
        images: uint8 tensors of (3, height, width), with any strides, all on the device of `out`.
        parts: Box, bounds and mirroring of each image.
        out: A floating-point tensor of (N, 3, height, width), with any strides.
        mean: The mean of each channel, for images scaled to 0..1.
        std: The standard deviation of each channel, likewise.

    Returns:
        `out`.

    >>> grey = torch.tensor([0, 100, 200], dtype=torch.uint8).expand(3, 2, 3)
    >>> parts = Parts(torch.tensor([[1.0, 0, 2, 2]]), torch.tensor([[0, 0, 3, 2]]), torch.tensor([True]))
    >>> (crop_batch([grey], parts, torch.empty(1, 3, 2, 2)) * 255)[0, 0, 0]
    tensor([200., 100.])
    """
    assert out.shape[0] == len(images) == len(parts.boxes), "one part for each image"
    if not images:
        return out
    if why_not_triton(out) is not None or out.dtype == torch.float64:
        return _twin(images, parts, out, mean, std)
    from bigstep.gpu.crops_triton import crop_kernel

    table = _table(images, parts, out.device)
    height, width = out.shape[2:]
    scales = [1 / (255 * deviation) for deviation in std]
    shifts = [-centre / deviation for centre, deviation in zip(mean, std, strict=True)]
    block = min(BLOCK, 1 << (width - 1).bit_length())
    with on_device_of(out):
        crop_kernel[(height, len(images), -(-width // block))](
            table, table.view(torch.float32), out, width, height, *out.stride(), *scales, *shifts,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _table(images: Sequence[Tensor], parts: Parts, device: torch.device) -> Tensor:
    """Return the kernel's table, int64 (N, 11): a row per image, the last two entries of which are the box as float32.

    It is one pinned tensor, so that a single copy moves it and the host does not wait.
    """
    table = torch.empty((len(images), 11), dtype=torch.int64, pin_memory=device.type == "cuda")
    rows = table.numpy()
    rows[:, 0] = [image.data_ptr() for image in images]
    rows[:, [3, 1, 2]] = [image.stride() for image in images]
    rows[:, 4:8] = parts.bounds.numpy()[:, [0, 2, 1, 3]]
    rows[:, 8] = parts.mirrored.numpy()
    rows[:, 9:].view(np.float32)[:] = parts.boxes.numpy()
    return table.to(device, non_blocking=True)


def crop_weights(begin: float, length: float, count: int, low: int, high: int) -> Tensor:
    """Return the weight of each pixel in [low, high) in each of `count` outputs that divide [begin, begin + length).

    w(i, x) = max(0, 1 - |x + 1/2 - c(i)| / r),  c(i) = begin + (i + 1/2) length / count,  r = max(length / count, 1),
    divided by their sum over x.

    Returns:
        float64 (count, high - low); rows sum to one.

    >>> crop_weights(0.0, 4.0, 2, 0, 4)
    tensor([[0.4286, 0.4286, 0.1429, 0.0000],
            [0.0000, 0.1429, 0.4286, 0.4286]], dtype=torch.float64)
    """
    step = length / count
    centre = begin + (torch.arange(count, dtype=torch.float64).unsqueeze(1) + 0.5) * step
    pixel = torch.arange(low, high, dtype=torch.float64) + 0.5
    weight = (1 - (pixel - centre).abs() / max(step, 1.0)).clamp(min=0)
    return weight / weight.sum(1, keepdim=True)


def _twin(
    images: Sequence[Tensor], parts: Parts, out: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """Compute what the kernel does in float64, image by image."""
    centre, deviation = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (mean, std))
    height, width = out.shape[2:]
    for index, image in enumerate(images):
        left, top, box_width, box_height = parts.boxes[index].tolist()
        x0, y0, x1, y1 = (int(edge) for edge in parts.bounds[index])
        across = crop_weights(left, box_width, width, x0, x1)
        down = crop_weights(top, box_height, height, y0, y1)
        if parts.mirrored[index]:
            across = across.flip(0)
        part = image[:, y0:y1, x0:x1].to("cpu", torch.float64)
        out[index] = ((down @ part @ across.T / 255 - centre) / deviation).to(out.dtype)
    return out
