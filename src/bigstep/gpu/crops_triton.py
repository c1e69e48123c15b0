"""Triton kernel that crops, resizes, mirrors and normalises a batch of differently sized images in one launch."""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
#
# A row of the result needs only a few rows of the image, so each program computes one row of the result: its vertical
# weights are scalars, the same for all of its pixels, and only its horizontal weights are vectors, each computed once.
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["crop_kernel"]


@triton.jit
def _weight(distance, by_reach):
    """The triangle filter: 1 at the centre, 0 from the distance 1 / by_reach on."""
    return tl.maximum(1.0 - tl.abs(distance) * by_reach, 0.0)


@triton.jit
def crop_kernel(
    places, boxes, out, width, height, out_image, out_channel, out_row, out_column,
    scale0, scale1, scale2, shift0, shift1, shift2, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row of one image of the batch, or BLOCK pixels of it.

    places: int64 (N, 11): address; bytes from one row, column and channel to the next; the first column that may be
    read and the end of those columns; the same for rows; whether to mirror; the box (two entries).
    boxes: the same memory as float32 (N, 22), the last four of which are left, top, width and height.
    """
    row, image = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    place, box = places + image * 11, boxes + image * 22 + 18
    pixels = tl.load(place).to(tl.pointer_type(tl.uint8))
    by_row = tl.load(place + 1).to(tl.int32)
    by_column = tl.load(place + 2).to(tl.int32)
    by_channel = tl.load(place + 3).to(tl.int32)
    x_low, x_high = tl.load(place + 4).to(tl.int32), tl.load(place + 5).to(tl.int32)
    y_low, y_high = tl.load(place + 6).to(tl.int32), tl.load(place + 7).to(tl.int32)
    from_column = tl.where(tl.load(place + 8) != 0, width - 1 - column, column)
    # image pixels per pixel of the result; the filter reaches one pixel of the image or the result, whichever is larger
    x_step, y_step = tl.load(box + 2) / width, tl.load(box + 3) / height
    x = tl.load(box) + (from_column.to(tl.float32) + 0.5) * x_step
    y = tl.load(box + 1) + (row.to(tl.float32) + 0.5) * y_step
    x_reach, y_reach = tl.maximum(x_step, 1.0), tl.maximum(y_step, 1.0)
    by_x, by_y = 1.0 / x_reach, 1.0 / y_reach
    first_x, x_taps = tl.floor(x - x_reach).to(tl.int32), tl.ceil(2 * x_reach).to(tl.int32) + 1
    first_y = tl.maximum(tl.floor(y - y_reach).to(tl.int32), y_low)
    end_y = tl.minimum(tl.ceil(y + y_reach).to(tl.int32), y_high)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    red = tl.zeros((BLOCK,), dtype=tl.float32)
    green = tl.zeros((BLOCK,), dtype=tl.float32)
    blue = tl.zeros((BLOCK,), dtype=tl.float32)
    for dx in range(0, x_taps):
        tap_x = first_x + dx
        inside = exists & (tap_x >= x_low) & (tap_x < x_high)
        across = tl.where(inside, _weight(tap_x + 0.5 - x, by_x), 0.0)
        seen = across > 0
        at = tap_x * by_column
        for tap_y in range(first_y, end_y):
            weight = across * _weight(tap_y + 0.5 - y, by_y)
            from_row = pixels + tap_y * by_row
            red += weight * tl.load(from_row + at, mask=seen, other=0).to(tl.float32)
            green += weight * tl.load(from_row + by_channel + at, mask=seen, other=0).to(tl.float32)
            blue += weight * tl.load(from_row + 2 * by_channel + at, mask=seen, other=0).to(tl.float32)
            total += weight
    total = tl.where(total > 0, total, 1.0)  # lanes past the last pixel have no weights
    into = out + image.to(tl.int64) * out_image + row * out_row + column * out_column
    kind = out.dtype.element_ty
    tl.store(into, (red / total * scale0 + shift0).to(kind), mask=exists)
    tl.store(into + out_channel, (green / total * scale1 + shift1).to(kind), mask=exists)
    tl.store(into + 2 * out_channel, (blue / total * scale2 + shift2).to(kind), mask=exists)
