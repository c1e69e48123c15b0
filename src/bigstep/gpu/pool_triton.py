"""Triton kernels for the end of the stem on NHWC tensors: batch norm + ReLU + 3x3 max-pool, stride 2, padding 1.

All three are one kernel, and the normalised tensor at full resolution is never written. For each pooled value, the
backward pass needs which of the nine inputs it came from (one byte) and that input before normalisation.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_plane_kernel", "normalize_pool_kernel", "unpool_backward_kernel"]


@triton.jit
def add_plane_kernel(x, out, elements, BLOCK: tl.constexpr):
    """Copy images of three planes, channels last, and add a fourth plane of zeros."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    plane = at % 4
    value = tl.load(x + at // 4 * 3 + plane, mask=(plane < 3) & (at < elements), other=0.0)
    tl.store(out + at, value, mask=at < elements)


@triton.jit
def normalize_pool_kernel(
    x,
    stats,
    y,
    winner,
    picked,
    images_per_group,
    height,
    width,
    out_height,
    out_width,
    channels,
    plane,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """Store y = maxpool(relu(x * scale + shift)); winner is the tap 0..8 of the maximum, picked its x."""
    line = tl.program_id(0)  # one line of one image's output
    n = line // out_height
    oh = line % out_height
    blocks = tl.cdiv(channels, BC)
    ow = (tl.program_id(1) // blocks) * BW + tl.arange(0, BW)
    c = (tl.program_id(1) % blocks) * BC + tl.arange(0, BC)
    inside = c < channels
    at_c = (n // images_per_group) * channels + c
    scale = tl.load(stats + 2 * plane + at_c, mask=inside, other=0.0)
    shift = tl.load(stats + 3 * plane + at_c, mask=inside, other=0.0)
    best = tl.full((BW, BC), float("-inf"), dtype=tl.float32)
    best_x = tl.zeros((BW, BC), dtype=x.dtype.element_ty)
    best_tap = tl.zeros((BW, BC), dtype=tl.int32)
    image = x + n.to(tl.int64) * height * width * channels
    for tap in tl.static_range(9):
        h = tl.zeros_like(ow) + (2 * oh - 1 + tap // 3)  # a block: the interpreter has no scalar booleans
        w = 2 * ow - 1 + tap % 3
        ok = ((h >= 0) & (h < height) & (w >= 0) & (w < width) & (ow < out_width))[:, None] & inside[None, :]
        value = tl.load(image + (h * width + w)[:, None] * channels + c[None, :], mask=ok, other=0.0)
        z = tl.where(ok, value.to(tl.float32) * scale[None, :] + shift[None, :], float("-inf"))
        better = (z > best) | (z != z)  # NaN wins, as in torch
        best = tl.where(better, z, best)
        best_x = tl.where(better, value, best_x)
        best_tap = tl.where(better, tap, best_tap)
    keep = (ow < out_width)[:, None] & inside[None, :]
    at = line.to(tl.int64) * out_width * channels + (ow[:, None] * channels + c[None, :])
    best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + at, best.to(y.dtype.element_ty), mask=keep)
    tl.store(picked + at, best_x, mask=keep)
    tl.store(winner + at, best_tap.to(tl.uint8), mask=keep)


@triton.jit
def unpool_backward_kernel(
    dz,
    winner,
    x,
    stats,
    coefficients,
    dx,
    images_per_group,
    height,
    width,
    out_height,
    out_width,
    channels,
    plane,
    BW: tl.constexpr,
    BC: tl.constexpr,
):
    """Store dx = scale * unpool(dz) + b * (x - mean) + c; each pixel gathers from the up to four windows it is in."""
    line = tl.program_id(0)  # one line of one image's input
    n = line // height
    h = line % height
    blocks = tl.cdiv(channels, BC)
    w = (tl.program_id(1) // blocks) * BW + tl.arange(0, BW)
    c = (tl.program_id(1) % blocks) * BC + tl.arange(0, BC)
    inside = c < channels
    keep = (w < width)[:, None] & inside[None, :]
    at_c = (n // images_per_group) * channels + c
    at = line.to(tl.int64) * width * channels + (w[:, None] * channels + c[None, :])
    value = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    total = tl.zeros((BW, BC), dtype=tl.float32)
    pooled = n.to(tl.int64) * out_height * out_width * channels
    for corner in tl.static_range(4):
        # Line h is in window (h + 1) // 2 and, if h is odd, also in the one before; likewise for columns.
        oh = tl.zeros_like(w) + ((h + 1) // 2 - corner // 2)
        ow = (w + 1) // 2 - corner % 2
        row_tap = h + 1 - 2 * oh
        column_tap = w + 1 - 2 * ow
        valid = (oh >= 0) & (oh < out_height) & (row_tap <= 2)
        ok = (valid & (ow >= 0) & (ow < out_width) & (column_tap <= 2))[:, None] & keep
        where = pooled + ((oh * out_width + ow)[:, None] * channels + c[None, :])
        tap = tl.load(winner + where, mask=ok, other=255).to(tl.int32)
        gradient = tl.load(dz + where, mask=ok, other=0.0).to(tl.float32)
        total += tl.where(tap == (row_tap * 3 + column_tap)[:, None], gradient, 0.0)
    mean = tl.load(stats + at_c, mask=inside, other=0.0)
    scale = tl.load(stats + 2 * plane + at_c, mask=inside, other=0.0)
    b = tl.load(coefficients + at_c, mask=inside, other=0.0)
    k = tl.load(coefficients + plane + at_c, mask=inside, other=0.0)
    result = scale[None, :] * total + b[None, :] * (value - mean[None, :]) + k[None, :]
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=keep)
