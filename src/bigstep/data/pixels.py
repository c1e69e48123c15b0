"""Exact statistics of pixels, without a floating-point copy of the images."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["count_values", "moments"]


def count_values(values: Tensor) -> Tensor:
    """Count how often each byte occurs: int64 of 256."""
    return torch.from_numpy(np.bincount(values.numpy().reshape(-1), minlength=256))


def moments(histogram: Tensor) -> dict[str, list[float]]:
    """Return mean and std of each channel, images scaled to 0..1, from the counts of its values.

    >>> moments(count_values(torch.tensor([0, 255], dtype=torch.uint8)).unsqueeze(0))
    {'mean': [0.5], 'std': [0.5]}
    """
    share = histogram.double() / histogram.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp(min=0).sqrt()
    return {"mean": [round(m, 4) for m in mean.tolist()], "std": [round(s, 4) for s in std.tolist()]}
