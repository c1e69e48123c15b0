"""Triton kernel that cuts, resizes, mirrors and normalises images of many sizes, wherever each lies, in one launch."""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["crop_kernel"]


@triton.jit
def _taps(place, begin, length, COUNT):
    """For each of COUNT output places along one axis: its centre in the image, and by what a distance is divided."""
    step = length / COUNT
    return begin + (place.to(tl.float32) + 0.5) * step, tl.maximum(step, 1.0)


@triton.jit
def _weight(tap, centre, reach, low, high):
    """The triangle filter: 1 at the centre, 0 from `reach` on, and nothing outside of [low, high)."""
    weight = tl.maximum(1.0 - tl.abs(tap.to(tl.float32) + 0.5 - centre) / reach, 0.0)
    return tl.where((tap >= low) & (tap < high), weight, 0.0)


@triton.jit
def crop_kernel(
    places, boxes, out, width, height, out_image, out_channel, out_row, out_column,
    scale0, scale1, scale2, shift0, shift1, shift2, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of one image of the batch.

    places: int64 (N, 9): address; bytes from a row, a column and a channel to the next; the first and the last but one
    column, the first and the last but one row that may be looked at; whether to mirror.
    boxes: float32 (N, 4): left, top, width, height.
    """
    image = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // width, at % width
    exists = at < width * height
    place = places + image * 9
    pixels = tl.load(place).to(tl.pointer_type(tl.uint8))
    by_row = tl.load(place + 1).to(tl.int32)
    by_column = tl.load(place + 2).to(tl.int32)
    by_channel = tl.load(place + 3).to(tl.int32)
    x_low, x_high = tl.load(place + 4).to(tl.int32), tl.load(place + 5).to(tl.int32)
    y_low, y_high = tl.load(place + 6).to(tl.int32), tl.load(place + 7).to(tl.int32)
    from_column = tl.where(tl.load(place + 8) != 0, width - 1 - column, column)
    box = boxes + image * 4
    x, x_reach = _taps(from_column, tl.load(box), tl.load(box + 2), width)
    y, y_reach = _taps(row, tl.load(box + 1), tl.load(box + 3), height)
    first_x, first_y = tl.floor(x - x_reach).to(tl.int32), tl.floor(y - y_reach).to(tl.int32)
    x_taps, y_taps = tl.ceil(2 * x_reach).to(tl.int32) + 1, tl.ceil(2 * y_reach).to(tl.int32) + 1
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    red = tl.zeros((BLOCK,), dtype=tl.float32)
    green = tl.zeros((BLOCK,), dtype=tl.float32)
    blue = tl.zeros((BLOCK,), dtype=tl.float32)
    for dy in range(0, y_taps):
        tap_y = first_y + dy
        weight_y = _weight(tap_y, y, y_reach, y_low, y_high)
        for dx in range(0, x_taps):
            tap_x = first_x + dx
            weight = weight_y * _weight(tap_x, x, x_reach, x_low, x_high)
            seen = exists & (weight > 0)
            from_pixel = pixels + tap_y * by_row + tap_x * by_column
            red += weight * tl.load(from_pixel, mask=seen, other=0).to(tl.float32)
            green += weight * tl.load(from_pixel + by_channel, mask=seen, other=0).to(tl.float32)
            blue += weight * tl.load(from_pixel + 2 * by_channel, mask=seen, other=0).to(tl.float32)
            total += weight
    total = tl.where(total > 0, total, 1.0)  # of places behind the last pixel
    into = out + image.to(tl.int64) * out_image + row * out_row + column * out_column
    kind = out.dtype.element_ty
    tl.store(into, (red / total * scale0 + shift0).to(kind), mask=exists)
    tl.store(into + out_channel, (green / total * scale1 + shift1).to(kind), mask=exists)
    tl.store(into + 2 * out_channel, (blue / total * scale2 + shift2).to(kind), mask=exists)
