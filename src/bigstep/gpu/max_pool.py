"""2x2 max-pooling that moves each value once; torch's own takes five times as long on channels_last tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor

from bigstep.gpu.backend import on_device_of
from bigstep.gpu.batch_norm import why_not_fused

__all__ = ["max_pool2"]

PIXELS, CHANNELS = 16, 128
"""Windows and channels of one program's tile."""


def max_pool2(x: Tensor) -> Tensor:
    """Return the maxima of the 2x2 windows of x; an odd last row or column is left out, as in torch.

    On a CUDA device it takes channels_last tensors of fp16, bf16 or fp32; elsewhere its twin is torch's `max_pool2d`.
    Among equal values the first receives the gradient.

    Args:
        x: Samples x channels x height x width.

    Returns:
        A tensor of half the height and width, rounded down.

    >>> max_pool2(torch.arange(16.0).view(1, 1, 4, 4)).flatten()
    tensor([ 5.,  7., 13., 15.])
    """
    if x.dim() == 4 and min(x.shape[2:]) >= 2 and why_not_fused(x) is None:
        return _MaxPool2.apply(x)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
    return F.max_pool2d(x, 2)


class _MaxPool2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Read x once; write its maxima and, in a byte each, their positions."""
        from bigstep.gpu.max_pool_triton import pool_kernel

        n, channels, height, width = x.shape
        rows, columns = height // 2, width // 2
        y = torch.empty((n, channels, rows, columns), dtype=x.dtype, device=x.device, memory_format=_NHWC)
        winner = torch.empty_like(y, dtype=torch.uint8)
        windows = n * rows * columns
        with on_device_of(x):
            pool_kernel[_grid(windows, channels)](
                x, y, winner, windows, rows, columns, height, width, channels, BM=PIXELS, BC=CHANNELS
            )
        ctx.save_for_backward(winner)
        ctx.size = height, width
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Read the gradient and the bytes once; write the gradient of x."""
        from bigstep.gpu.max_pool_triton import unpool_kernel

        (winner,) = ctx.saved_tensors
        height, width = ctx.size
        dy = gradients[0].contiguous(memory_format=_NHWC)
        n, channels, out_rows, out_columns = dy.shape
        dx = torch.empty((n, channels, height, width), dtype=dy.dtype, device=dy.device, memory_format=_NHWC)
        rows, columns = -(-height // 2), -(-width // 2)  # also windows cut by an odd edge: zeros go there
        windows = n * rows * columns
        with on_device_of(dy):
            unpool_kernel[_grid(windows, channels)](
                dy, winner, dx, windows, rows, columns, out_rows, out_columns, height, width, channels,
                BM=PIXELS, BC=CHANNELS,
            )  # fmt: skip
        return dx


_NHWC = torch.channels_last


def _grid(windows: int, channels: int) -> tuple[int, int]:
    return -(-windows // PIXELS), -(-channels // CHANNELS)
