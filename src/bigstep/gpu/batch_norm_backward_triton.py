"""Triton kernels of the backward pass of batch norm + ReLU (+ residual) on NHWC tensors.

With z = x * scale + shift [+ residual] and dz = dy * (z > 0), a first pass sums dz and dz * (x - mean) and a second one
writes dx = scale * dz + b * (x - mean) + c, where b and c come from the channel's two sums.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

from bigstep.gpu.tiles_triton import half_row, read, unpack_bits, write

__all__ = ["backward_coefficients_kernel", "backward_input_kernel", "backward_sums_kernel"]


@triton.jit
def backward_sums_kernel(
    dy,
    dy2,
    x,
    stats,
    other,
    other_stats,
    signs,
    dz,
    partial,
    rows,
    channels,
    parts,
    height,
    width,
    BM: tl.constexpr,
    BC: tl.constexpr,
    EVEN: tl.constexpr,
    MASK: tl.constexpr,
    PAIR: tl.constexpr,
    OTHER: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Sum over rows dz, dz * (x - mean) [and dz * (other - other_mean)], where dz = (dy [+ dy2]) * (y > 0).

    MASK: 0 no ReLU, 1 recompute y > 0 from x, 2 read it from signs. PAIR: 0 no dy2, 1 dy2 has dy's shape, 2 dy2 holds
    only the even lines and columns of a height x width image. partial is (2 or 3, groups, parts, channels).
    """
    blocks = tl.cdiv(channels, BC)
    part = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BC
    c = first + tl.arange(0, BC)
    inside = c < channels
    g = tl.program_id(1)
    plane = tl.num_programs(1) * channels
    coefficient = g * channels + c
    mean = tl.load(stats + coefficient, mask=inside, other=0.0)
    if MASK == 1:
        scale = tl.load(stats + 2 * plane + coefficient, mask=inside, other=0.0)
        shift = tl.load(stats + 3 * plane + coefficient, mask=inside, other=0.0)
    if OTHER:
        other_mean = tl.load(other_stats + coefficient, mask=inside, other=0.0)
        sum3 = tl.zeros((BM, BC), dtype=tl.float32)
    sum1 = tl.zeros((BM, BC), dtype=tl.float32)
    sum2 = tl.zeros((BM, BC), dtype=tl.float32)
    r = tl.arange(0, BM)
    offsets = r[:, None] * channels + c[None, :]
    packed_c = first // 8 + tl.arange(0, BC // 8)
    packed_offsets = r[:, None] * (channels // 8) + packed_c[None, :]
    tiles = tl.cdiv(rows, BM)
    group_base = g.to(tl.int64) * rows * channels
    for t in range(part, tiles, parts):
        tile = tiles - 1 - t
        base = group_base + tile.to(tl.int64) * BM * channels
        ok = ((tile * BM + r) < rows)[:, None] & inside[None, :]
        gradient = read(dy + base + offsets, ok, EVEN)
        value = read(x + base + offsets, ok, EVEN)
        if PAIR == 1:
            gradient += read(dy2 + base + offsets, ok, EVEN)
        if PAIR == 2:
            half, there = half_row(g * rows + tile * BM + r, height, width)
            gradient += read(dy2 + half[:, None] * channels + c[None, :], ok & there[:, None], False)
        if MASK == 1:
            gradient = tl.where(value * scale[None, :] + shift[None, :] > 0, gradient, 0.0)
        if MASK == 2:
            packed_ok = ((tile * BM + r) < rows)[:, None] & (packed_c < channels // 8)[None, :]
            packed = tl.load(signs + base // 8 + packed_offsets, mask=packed_ok, other=0)
            gradient = tl.where(unpack_bits(packed, BM, BC), gradient, 0.0)
        if WRITE:
            rounded = gradient.to(dz.dtype.element_ty)
            write(dz + base + offsets, rounded, ok, EVEN)
            gradient = rounded.to(tl.float32)
        sum1 += gradient
        sum2 += gradient * (value - mean[None, :])
        if OTHER:
            more = read(other + base + offsets, ok, EVEN)
            sum3 += gradient * (more - other_mean[None, :])
    out = partial + (g.to(tl.int64) * parts + part) * channels + c
    size = tl.num_programs(1).to(tl.int64) * parts * channels
    tl.store(out, tl.sum(sum1, axis=0), mask=inside)
    tl.store(out + size, tl.sum(sum2, axis=0), mask=inside)
    if OTHER:
        tl.store(out + 2 * size, tl.sum(sum3, axis=0), mask=inside)


@triton.jit
def backward_coefficients_kernel(
    partial,
    stats,
    coefficients,
    dweight,
    dbias,
    rows,
    channels,
    parts,
    groups,
    which,
    BC: tl.constexpr,
    BP: tl.constexpr,
    BG: tl.constexpr,
):
    """Store the gradients of weight and bias, and b, c of dx = scale * dz + b * (x - mean) + c by group and channel.

    which: 1 uses the second sum of `partial`, 2 the third. coefficients is (2, groups, channels).
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < channels
    p = tl.arange(0, BP)
    size = groups * parts * channels
    plane = groups * channels
    weight_sum = tl.zeros((BC,), dtype=tl.float32)
    bias_sum = tl.zeros((BC,), dtype=tl.float32)
    for first in range(0, groups, BG):
        g = first + tl.arange(0, BG)
        at = (g[:, None, None] * parts + p[None, :, None]) * channels + c[None, None, :]
        ok = (g < groups)[:, None, None] & (p < parts)[None, :, None] & inside[None, None, :]
        sum1 = tl.sum(tl.load(partial + at, mask=ok, other=0.0), axis=1)
        sum2 = tl.sum(tl.load(partial + which * size + at, mask=ok, other=0.0), axis=1)
        at2 = g[:, None] * channels + c[None, :]
        keep = (g < groups)[:, None] & inside[None, :]
        rstd = tl.load(stats + plane + at2, mask=keep, other=0.0)
        scale = tl.load(stats + 2 * plane + at2, mask=keep, other=0.0)
        tl.store(coefficients + at2, -scale * rstd * rstd * sum2 / rows, mask=keep)
        tl.store(coefficients + plane + at2, -scale * sum1 / rows, mask=keep)
        weight_sum += tl.sum(sum2 * rstd, axis=0)
        bias_sum += tl.sum(sum1, axis=0)
    tl.store(dweight + c, weight_sum.to(dweight.dtype.element_ty), mask=inside)
    tl.store(dbias + c, bias_sum.to(dbias.dtype.element_ty), mask=inside)


@triton.jit
def backward_input_kernel(
    dz,
    x,
    stats,
    coefficients,
    dx,
    other,
    other_stats,
    other_coefficients,
    dother,
    rows,
    channels,
    BM: tl.constexpr,
    BC: tl.constexpr,
    EVEN: tl.constexpr,
    MASK: tl.constexpr,
    OTHER: tl.constexpr,
):
    """Store dx = scale * dz + b * (x - mean) + c, and likewise dother; MASK == 1 masks dz by y > 0 from x for dx."""
    blocks = tl.cdiv(channels, BC)
    tile = tl.program_id(0) // blocks
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    inside = c < channels
    g = tl.program_id(1)
    plane = tl.num_programs(1) * channels
    at_c = g * channels + c
    r = tl.arange(0, BM)
    base = g.to(tl.int64) * rows * channels + tile.to(tl.int64) * BM * channels
    at = base + (r[:, None] * channels + c[None, :])
    ok = ((tile * BM + r) < rows)[:, None] & inside[None, :]
    gradient = read(dz + at, ok, EVEN)
    value = read(x + at, ok, EVEN)
    mean = tl.load(stats + at_c, mask=inside, other=0.0)
    scale = tl.load(stats + 2 * plane + at_c, mask=inside, other=0.0)
    b = tl.load(coefficients + at_c, mask=inside, other=0.0)
    k = tl.load(coefficients + plane + at_c, mask=inside, other=0.0)
    if OTHER:
        more = read(other + at, ok, EVEN)
        other_mean = tl.load(other_stats + at_c, mask=inside, other=0.0)
        other_scale = tl.load(other_stats + 2 * plane + at_c, mask=inside, other=0.0)
        other_b = tl.load(other_coefficients + at_c, mask=inside, other=0.0)
        other_k = tl.load(other_coefficients + plane + at_c, mask=inside, other=0.0)
        result = other_scale[None, :] * gradient + other_b[None, :] * (more - other_mean[None, :]) + other_k[None, :]
        write(dother + at, result, ok, EVEN)
    if MASK == 1:
        shift = tl.load(stats + 3 * plane + at_c, mask=inside, other=0.0)
        gradient = tl.where(value * scale[None, :] + shift[None, :] > 0, gradient, 0.0)
    result = scale[None, :] * gradient + b[None, :] * (value - mean[None, :]) + k[None, :]
    write(dx + at, result, ok, EVEN)
