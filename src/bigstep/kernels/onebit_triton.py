"""1-bit encoding and decoding on a GPU: one program a block, one pass over memory, everything else in registers.

A block of L values is seen as eight rows of n = ceil(L / 8), so that bits of one byte lie in one column of the tile.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from bigstep.kernels.onebit import Blocks

__all__ = ["decode", "encode"]

# columns of the tile, by the longest row of the blocks that a launch holds; 512 is enough for 4096 values
_COLUMNS = (64, 128, 256, 512)
_COLUMNS_PER_WARP = 64


@triton.jit
def _encode_kernel(chosen, values, residual, starts, lengths, means_at, bits_at, message, means, COLUMNS: tl.constexpr):
    block = tl.load(chosen + tl.program_id(0))
    start, length = tl.load(starts + block), tl.load(lengths + block)
    row = (length + 7) // 8
    k = tl.arange(0, 8)[:, None]
    j = tl.arange(0, COLUMNS)[None, :]
    at = k * row + j
    inside = (j < row) & (at < length)
    x = tl.load(values + start + at, mask=inside, other=0.0)
    old = tl.load(residual + start + at, mask=inside, other=0.0)
    x += old
    bit = (x >= 0) & inside
    positive = tl.sum(tl.sum(tl.where(bit, x, 0.0), axis=1), axis=0)
    negative = tl.sum(tl.sum(tl.where(bit, 0.0, x), axis=1), axis=0)
    count = tl.sum(tl.sum(bit.to(tl.int32), axis=1), axis=0)
    r1 = (positive / tl.maximum(count, 1)).to(tl.float32)
    r0 = (negative / tl.maximum(length - count, 1)).to(tl.float32)
    total = positive + negative
    finite = (total > float("-inf")) & (total < float("inf"))  # false for NaN, too
    new = tl.where(finite, x - tl.where(bit, r1, r0), old)
    tl.store(residual + start + at, new, mask=inside)
    tl.store(means + tl.load(means_at + block), tl.where(finite, r0, float("nan")))
    tl.store(means + tl.load(means_at + block) + 1, tl.where(finite, r1, float("nan")))
    byte = tl.sum(bit.to(tl.int32) << k, axis=0).to(tl.uint8)
    column = tl.arange(0, COLUMNS)
    tl.store(message + tl.load(bits_at + block) + column, byte, mask=column < row)


@triton.jit
def _decode_kernel(
    chosen, messages, means, starts, lengths, means_at, bits_at, out, copies, stride, scale, COLUMNS: tl.constexpr
):
    block = tl.load(chosen + tl.program_id(0))
    start, length = tl.load(starts + block), tl.load(lengths + block)
    row = (length + 7) // 8
    k = tl.arange(0, 8)[:, None]
    column = tl.arange(0, COLUMNS)
    j = column[None, :]
    at = k * row + j
    inside = (j < row) & (at < length)
    total = tl.zeros((8, COLUMNS), dtype=out.dtype.element_ty)
    for copy in range(copies):
        first = copy * stride
        r0 = tl.load(means + first // 4 + tl.load(means_at + block))
        r1 = tl.load(means + first // 4 + tl.load(means_at + block) + 1)
        byte = tl.load(messages + first + tl.load(bits_at + block) + column, mask=column < row, other=0).to(tl.int32)
        total += tl.where(((byte[None, :] >> k) & 1) != 0, r1, r0)
    tl.store(out + start + at, (total * scale).to(out.dtype.element_ty), mask=inside)


def encode(values: Tensor, residual: Tensor, blocks: Blocks, message: Tensor) -> None:
    """`bigstep.kernels.onebit.encode` on CUDA tensors."""
    for columns, chosen in _by_size(blocks):
        _encode_kernel[(chosen.numel(),)](
            chosen, values, residual, blocks.starts, blocks.lengths, blocks.means_at, blocks.bits_at,
            message, _as_float(message), COLUMNS=columns, num_warps=max(1, columns // _COLUMNS_PER_WARP),
        )  # fmt: skip


def decode(messages: Tensor, blocks: Blocks, out: Tensor, copies: int, stride: int, scale: float) -> None:
    """`bigstep.kernels.onebit.decode` on CUDA tensors."""
    for columns, chosen in _by_size(blocks):
        _decode_kernel[(chosen.numel(),)](
            chosen, messages, _as_float(messages), blocks.starts, blocks.lengths, blocks.means_at, blocks.bits_at,
            out, copies, stride, scale, COLUMNS=columns, num_warps=max(1, columns // _COLUMNS_PER_WARP),
        )  # fmt: skip


_sizes = WeakTensorKeyDictionary()  # tables of blocks live as long as their exchange


def _by_size(blocks: Blocks) -> list[tuple[int, Tensor]]:
    """Columns of the tile and the blocks that it fits, found once a table: a wide tile for a short block is idle."""
    found: list[tuple[int, Tensor]] | None = _sizes.get(blocks.lengths)  # type: ignore[no-untyped-call]
    if found is None:
        rows, found, below = (blocks.lengths + 7) // 8, [], 0
        for columns in _COLUMNS:
            chosen = ((rows > below) & (rows <= columns)).nonzero().flatten()
            below = columns
            if chosen.numel():
                found.append((columns, chosen))
        _sizes[blocks.lengths] = found
    return found


def _as_float(message: Tensor) -> Tensor:
    return message[: message.numel() // 4 * 4].view(torch.float32)
