"""Triton kernels of the forward pass of batch norm + ReLU (+ residual) on NHWC tensors.

A tensor is seen as `groups` x `rows` x `channels`, channels varying fastest. Sums are in fp32. Passes over a tensor
alternate in direction (statistics from the last row to the first, normalisation from the first to the last), so that a
pass begins with the rows that the one before it left in the L2 cache.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

from bigstep.gpu.tiles_triton import half_row, pack_bits, read, rows_of_part, write

__all__ = ["merge_statistics_kernel", "normalize_kernel", "statistics_kernel"]


@triton.jit
def statistics_kernel(x, partial, rows, channels, parts, BM: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr):
    """Store mean and centred sum of squares of each part of a group's rows; partial is (2, groups, parts, channels)."""
    blocks = tl.cdiv(channels, BC)
    part = tl.program_id(0) // blocks
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    g = tl.program_id(1)
    inside = c < channels
    r = tl.arange(0, BM)
    offsets = r[:, None] * channels + c[None, :]
    x += g.to(tl.int64) * rows * channels
    tiles = tl.cdiv(rows, BM)
    # Sums are of differences from one value of the channel, which saves digits where mean >> deviation.
    pivot = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    sum1 = tl.zeros((BM, BC), dtype=tl.float32)
    sum2 = tl.zeros((BM, BC), dtype=tl.float32)
    for t in range(part, tiles, parts):
        tile = tiles - 1 - t
        here = x + tile.to(tl.int64) * BM * channels + offsets
        if EVEN:
            d = tl.load(here).to(tl.float32) - pivot[None, :]
        else:
            ok = ((tile * BM + r) < rows)[:, None] & inside[None, :]
            d = tl.where(ok, tl.load(here, mask=ok, other=0.0).to(tl.float32) - pivot[None, :], 0.0)
        sum1 += d
        sum2 += d * d
    count = rows_of_part(part, parts, rows, BM).to(tl.float32)
    total1 = tl.sum(sum1, axis=0)
    total2 = tl.sum(sum2, axis=0)
    out = partial + (g.to(tl.int64) * parts + part) * channels + c
    tl.store(out, pivot + total1 / count, mask=inside)
    size = tl.num_programs(1).to(tl.int64) * parts * channels
    tl.store(out + size, tl.maximum(total2 - total1 * total1 / count, 0.0), mask=inside)


@triton.jit
def merge_statistics_kernel(
    partial,
    weight,
    bias,
    running_mean,
    running_var,
    stats,
    rows,
    channels,
    parts,
    groups,
    momentum,
    eps,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    BG: tl.constexpr,
    MEAN: tl.constexpr,
    VAR: tl.constexpr,
):
    """Merge the parts by Chan's rule; stats is (4, groups, channels): mean, 1/deviation, scale, shift."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < channels
    p = tl.arange(0, BP)
    count = tl.where(p < parts, rows_of_part(p, parts, rows, BM), 0).to(tl.float32)[None, :, None]
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    mean_sum = tl.zeros((BC,), dtype=tl.float32)
    var_sum = tl.zeros((BC,), dtype=tl.float32)
    size = groups * parts * channels
    plane = groups * channels
    for first in range(0, groups, BG):
        g = first + tl.arange(0, BG)
        at = (g[:, None, None] * parts + p[None, :, None]) * channels + c[None, None, :]
        ok = (g < groups)[:, None, None] & (p < parts)[None, :, None] & inside[None, None, :]
        means = tl.load(partial + at, mask=ok, other=0.0)
        squares = tl.load(partial + size + at, mask=ok, other=0.0)
        mean = tl.sum(means * count, axis=1) / rows
        away = means - mean[:, None, :]
        squares = tl.sum(tl.where(ok, squares + count * away * away, 0.0), axis=1)
        rstd = tl.rsqrt(squares / rows + eps)
        scale = w[None, :] * rstd
        out = stats + g[:, None] * channels + c[None, :]
        keep = (g < groups)[:, None] & inside[None, :]
        tl.store(out, mean, mask=keep)
        tl.store(out + plane, rstd, mask=keep)
        tl.store(out + 2 * plane, scale, mask=keep)
        tl.store(out + 3 * plane, b[None, :] - mean * scale, mask=keep)
        if MEAN:
            mean_sum += tl.sum(tl.where(keep, mean, 0.0), axis=0)
        if VAR:
            var_sum += tl.sum(tl.where(keep, squares, 0.0), axis=0) / (rows - 1)
    if MEAN:
        old_mean = tl.load(running_mean + c, mask=inside, other=0.0)
        tl.store(running_mean + c, old_mean + momentum * (mean_sum / groups - old_mean), mask=inside)
    if VAR:
        old_var = tl.load(running_var + c, mask=inside, other=0.0)
        tl.store(running_var + c, old_var + momentum * (var_sum / groups - old_var), mask=inside)


@triton.jit
def normalize_kernel(
    x,
    stats,
    residual,
    other,
    other_stats,
    y,
    y2,
    signs,
    rows,
    channels,
    height,
    width,
    BM: tl.constexpr,
    BC: tl.constexpr,
    EVEN: tl.constexpr,
    RELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OTHER: tl.constexpr,
    SIGNS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Store y = relu(x * scale + shift [+ residual] [+ other * other_scale + other_shift]); signs: y > 0 as bits.

    With HALF, every second line and column of y is also stored in y2.
    """
    blocks = tl.cdiv(channels, BC)
    tile = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BC
    c = first + tl.arange(0, BC)
    inside = c < channels
    g = tl.program_id(1)
    plane = tl.num_programs(1) * channels
    r = tl.arange(0, BM)
    base = g.to(tl.int64) * rows * channels + tile.to(tl.int64) * BM * channels
    at = base + (r[:, None] * channels + c[None, :])
    ok = ((tile * BM + r) < rows)[:, None] & inside[None, :]
    coefficient = g * channels + c
    scale = tl.load(stats + 2 * plane + coefficient, mask=inside, other=0.0)
    shift = tl.load(stats + 3 * plane + coefficient, mask=inside, other=0.0)
    z = read(x + at, ok, EVEN) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        z += read(residual + at, ok, EVEN)
    if OTHER:
        other_scale = tl.load(other_stats + 2 * plane + coefficient, mask=inside, other=0.0)
        other_shift = tl.load(other_stats + 3 * plane + coefficient, mask=inside, other=0.0)
        more = read(other + at, ok, EVEN)
        z += more * other_scale[None, :] + other_shift[None, :]
    if SIGNS:
        packed_c = first // 8 + tl.arange(0, BC // 8)
        packed_ok = ((tile * BM + r) < rows)[:, None] & (packed_c < channels // 8)[None, :]
        packed_at = base // 8 + (r[:, None] * (channels // 8) + packed_c[None, :])
        tl.store(signs + packed_at, pack_bits(z > 0, BM, BC), mask=packed_ok)
    if RELU:
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)  # else NaN would become 0 and go unnoticed
    write(y + at, z, ok, EVEN)
    if HALF:
        half, there = half_row(g * rows + tile * BM + r, height, width)
        write(y2 + half[:, None] * channels + c[None, :], z, ok & there[:, None], False)
