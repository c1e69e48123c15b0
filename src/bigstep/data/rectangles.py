"""Evaluation on whole images, in batches of similar aspect ratio, instead of square centre crops."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rectangle_of", "rectangular_batches"]

_STRIDE = 32  # sides of rectangles are multiples of it: a ResNet shrinks by 32
_MAX_ASPECT = 2.0  # longer images are trimmed to this, so that a panorama does not make a batch of its own


def rectangle_of(width: int, height: int, size: int) -> tuple[int, int]:
    """Return the (width, height) at which an image is evaluated whole: short side `size`, long side a multiple of 32.

    >>> rectangle_of(500, 375, 288), rectangle_of(375, 500, 288), rectangle_of(3000, 300, 288)
    ((384, 288), (288, 384), (576, 288))
    """
    aspect = min(max(width, height) / min(width, height), _MAX_ASPECT)
    long = max(round(size * aspect / _STRIDE) * _STRIDE, size)
    return (long, size) if width >= height else (size, long)


def rectangular_batches(sizes: Tensor, size: int, batch: int) -> list[Tensor]:
    """Group all samples into batches of one shape each: every sample once, ordered by shape.

    The shape of a sample depends on that sample alone, so it changes neither with the batch nor with the number of
    ranks.

    Args:
        sizes: width and height of each image in pixels, (N, 2).
        size: the short side in pixels.
        batch: samples in a batch at most.

    Returns:
        Indices of each batch, int64.

    Reference: the rectangular validation of fast.ai's DAWNBench entry, 2018.
    Differs from it: shapes are in steps of 32 pixels instead of the mean of a batch, and nothing is cut off but what
    the rounding takes, and what of an image lies beyond an aspect ratio of 2.
    """
    shapes = [rectangle_of(width, height, size) for width, height in sizes.tolist()]
    order = sorted(range(len(shapes)), key=lambda index: (shapes[index], index))
    groups: dict[tuple[int, int], list[int]] = {}
    for index in order:
        groups.setdefault(shapes[index], []).append(index)
    return [part for group in groups.values() for part in torch.split(torch.tensor(group), batch)]
