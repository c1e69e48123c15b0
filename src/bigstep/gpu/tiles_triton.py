"""Helpers shared by the Triton kernels on tiles of rows x channels."""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["half_row", "pack_bits", "read", "rows_of_part", "unpack_bits", "write"]


@triton.jit
def read(pointer, ok, EVEN: tl.constexpr):
    """A tile in fp32; with EVEN every tile is full and no mask is needed."""
    tile = tl.load(pointer) if EVEN else tl.load(pointer, mask=ok, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def write(pointer, tile, ok, EVEN: tl.constexpr):
    """Store a tile in the pointer's own type."""
    if EVEN:
        tl.store(pointer, tile.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer, tile.to(pointer.dtype.element_ty), mask=ok)


@triton.jit
def rows_of_part(part, parts, rows, BM: tl.constexpr):
    """Number of rows in a part: tiles part, part + parts, ..., counted from the last one, which may be short."""
    tiles = (rows + BM - 1) // BM
    mine = (tiles - part + parts - 1) // parts
    return mine * BM - tl.where(part == 0, tiles * BM - rows, 0)


@triton.jit
def pack_bits(mask, BM: tl.constexpr, BC: tl.constexpr):
    """(BM, BC) truth values -> (BM, BC / 8) bytes, the first channel in the lowest bit."""
    bits = tl.reshape(mask.to(tl.int32), (BM, BC // 8, 8)) << tl.arange(0, 8)[None, None, :]
    return tl.sum(bits, axis=2).to(tl.uint8)


@triton.jit
def unpack_bits(packed, BM: tl.constexpr, BC: tl.constexpr):
    """(BM, BC / 8) bytes -> (BM, BC) truth values."""
    bits = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(bits, (BM, BC)) != 0


@triton.jit
def half_row(row, height, width):
    """The row of a pixel in the image of every second line and column, and whether that image contains it."""
    line = row // width
    column = row % width
    half = (line // height * ((height + 1) // 2) + line % height // 2) * ((width + 1) // 2) + column // 2
    return half.to(tl.int64), (line % height % 2 == 0) & (column % 2 == 0)
