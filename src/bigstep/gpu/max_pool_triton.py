"""Triton kernels of 2x2 max-pooling on NHWC tensors: each value is moved once forward and once backward."""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pool_kernel", "unpool_kernel"]


@triton.jit
def _windows(program, windows, rows, columns, height, width, BM: tl.constexpr):
    """For a tile of windows: index, first input pixel, whether each exists, whether its second line and column do.

    `rows` x `columns` windows cover an image; those at an odd edge are cut off.
    """
    window = program.to(tl.int64) * BM + tl.arange(0, BM)
    ow = window % columns
    oh = window // columns % rows
    first = (window // (rows * columns) * height + 2 * oh) * width + 2 * ow
    exists = window < windows
    return window, first, exists, exists & (2 * oh + 1 < height), exists & (2 * ow + 1 < width)


@triton.jit
def pool_kernel(x, y, winner, windows, rows, columns, height, width, channels, BM: tl.constexpr, BC: tl.constexpr):
    """Store the maximum of each whole window and which of its four values that is, the first among equals."""
    window, first, exists, _, _ = _windows(tl.program_id(0), windows, rows, columns, height, width, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = exists[:, None] & (c < channels)[None, :]
    at = first[:, None] * channels + c[None, :]
    best = tl.load(x + at, mask=ok, other=0.0)
    which = tl.zeros((BM, BC), dtype=tl.int32)
    for tap in tl.static_range(1, 4):
        value = tl.load(x + at + ((tap // 2) * width + tap % 2) * channels, mask=ok, other=0.0)
        better = (value > best) | (value != value)  # NaN wins, as in torch
        best = tl.where(better, value, best)
        which = tl.where(better, tap, which)
    out = window[:, None] * channels + c[None, :]
    tl.store(y + out, best, mask=ok)
    tl.store(winner + out, which.to(tl.uint8), mask=ok)


@triton.jit
def unpool_kernel(
    dy, winner, dx, windows, rows, columns, out_rows, out_columns, height, width, channels,
    BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the gradient of each window at its winner and zeros elsewhere, also in windows cut by an odd edge."""
    window, first, exists, below, right = _windows(tl.program_id(0), windows, rows, columns, height, width, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (c < channels)[None, :]
    image = window // (rows * columns)
    pooled = (image * out_rows + window // columns % rows) * out_columns + window % columns
    whole = (below & right)[:, None] & inside
    out = pooled[:, None] * channels + c[None, :]
    gradient = tl.load(dy + out, mask=whole, other=0.0)
    which = tl.load(winner + out, mask=whole, other=4).to(tl.int32)
    at = first[:, None] * channels + c[None, :]
    zero = tl.zeros_like(gradient)
    tl.store(dx + at, tl.where(which == 0, gradient, zero), mask=exists[:, None] & inside)
    tl.store(dx + at + channels, tl.where(which == 1, gradient, zero), mask=right[:, None] & inside)
    tl.store(dx + at + width * channels, tl.where(which == 2, gradient, zero), mask=below[:, None] & inside)
    tl.store(dx + at + (width + 1) * channels, tl.where(which == 3, gradient, zero), mask=whole)
