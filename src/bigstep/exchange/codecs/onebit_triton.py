"""1-bit encoding and decoding on a GPU: one program per block, one pass over memory, everything else in registers.

A block of L values is viewed as eight rows of n = ceil(L / 8), so that the bits of a byte lie in a column of the tile.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bigstep.exchange.codecs import Blocks, see_floats
from bigstep.gpu.backend import on_device_of

__all__ = ["decode", "encode"]

# Columns of the tile and of a second one beside it; a launch takes the blocks whose rows just fit. Tiles must have a
# power of two columns, and idle columns cost as much as busy ones. 512 is enough for 4096 values.
_TILES = ((64, 0), (128, 0), (128, 64), (256, 0), (256, 64), (256, 128), (512, 0))
_COLUMNS_PER_WARP = 128


@triton.jit
def _tile(values, residual, start, length, row, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of a block from FIRST on: where they are, which exist, the old residual, values plus residual."""
    k = tl.arange(0, 8)[:, None]
    j = FIRST + tl.arange(0, COLUMNS)[None, :]
    at = start + k * row + j
    inside = (j < row) & (k * row + j < length)
    old = tl.load(residual + at, mask=inside, other=0.0)
    return at, inside, old, tl.load(values + at, mask=inside, other=0.0) + old


@triton.jit
def _sums(x, bit):
    """Sums of the values with and without a bit, and how many have one."""
    positive = tl.sum(tl.sum(tl.where(bit, x, 0.0), axis=1), axis=0)
    negative = tl.sum(tl.sum(tl.where(bit, 0.0, x), axis=1), axis=0)
    return positive, negative, tl.sum(tl.sum(bit.to(tl.int32), axis=1), axis=0)


@triton.jit
def _keep(residual, at, inside, old, x, bit, r0, r1, finite):
    """Store what the code misses as the new residual."""
    tl.store(residual + at, tl.where(finite, x - tl.where(bit, r1, r0), old), mask=inside)


@triton.jit
def _bits(message, bits_at, bit, row, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the eight bits of each column as a byte."""
    byte = tl.sum(bit.to(tl.int32) << tl.arange(0, 8)[:, None], axis=0).to(tl.uint8)
    column = FIRST + tl.arange(0, COLUMNS)
    tl.store(message + bits_at + column, byte, mask=column < row)


@triton.jit
def _encode_kernel(
    chosen, values, residual, starts, lengths, means_at, bits_at, message, means,
    COLUMNS: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    block = tl.load(chosen + tl.program_id(0))
    start, length = tl.load(starts + block), tl.load(lengths + block)
    row = (length + 7) // 8
    at, inside, old, x = _tile(values, residual, start, length, row, 0, COLUMNS)
    bit = (x >= 0) & inside
    positive, negative, count = _sums(x, bit)
    if MORE:
        at2, inside2, old2, x2 = _tile(values, residual, start, length, row, COLUMNS, MORE)
        bit2 = (x2 >= 0) & inside2
        positive2, negative2, count2 = _sums(x2, bit2)
        positive, negative, count = positive + positive2, negative + negative2, count + count2
    r1 = (positive / tl.maximum(count, 1)).to(tl.float32)
    r0 = (negative / tl.maximum(length - count, 1)).to(tl.float32)
    total = positive + negative
    finite = (total > float("-inf")) & (total < float("inf"))  # false for NaN, too
    _keep(residual, at, inside, old, x, bit, r0, r1, finite)
    tl.store(means + tl.load(means_at + block), tl.where(finite, r0, float("nan")))
    tl.store(means + tl.load(means_at + block) + 1, tl.where(finite, r1, float("nan")))
    first = tl.load(bits_at + block)
    _bits(message, first, bit, row, 0, COLUMNS)
    if MORE:
        _keep(residual, at2, inside2, old2, x2, bit2, r0, r1, finite)
        _bits(message, first, bit2, row, COLUMNS, MORE)


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
    """`OneBit.encode` on CUDA tensors."""
    for columns, more, chosen in _by_size(blocks):
        with on_device_of(values):
            _encode_kernel[(chosen.numel(),)](
                chosen, values, residual, blocks.starts, blocks.lengths, blocks.heads_at, blocks.bodies_at, message,
                see_floats(message), COLUMNS=columns, MORE=more, num_warps=max(1, columns // _COLUMNS_PER_WARP),
            )  # fmt: skip


def decode(messages: Tensor, blocks: Blocks, out: Tensor, copies: int, stride: int, scale: float) -> None:
    """`OneBit.decode` on CUDA tensors."""
    for columns, more, chosen in _by_size(blocks):
        width = 2 * columns if more else columns  # decoding waits for memory: idle columns cost little
        with on_device_of(messages):
            _decode_kernel[(chosen.numel(),)](
                chosen, messages, see_floats(messages), blocks.starts, blocks.lengths, blocks.heads_at,
                blocks.bodies_at, out, copies, stride, scale,
                COLUMNS=width, num_warps=max(1, width // _COLUMNS_PER_WARP),
            )  # fmt: skip


_sizes = WeakTensorKeyDictionary()  # tables of blocks live as long as their exchange


def _by_size(blocks: Blocks) -> list[tuple[int, int, Tensor]]:
    """Tile columns and the blocks that fit them, found once per table: short blocks would leave a wide tile idle."""
    found: list[tuple[int, int, Tensor]] | None = _sizes.get(blocks.lengths)  # type: ignore[no-untyped-call]
    if found is None:
        rows, found, below = (blocks.lengths + 7) // 8, [], 0
        for columns, more in _TILES:
            chosen = ((rows > below) & (rows <= columns + more)).nonzero().flatten()
            below = columns + more
            if chosen.numel():
                found.append((columns, more, chosen))
        _sizes[blocks.lengths] = found
    return found
