"""Loads, stores and sums shared by the Triton kernels over chunks of tensors; see `bigstep.gpu.chunks.Chunks`."""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["partial_sum", "pointer_of", "put", "put_copy", "take"]


@triton.jit
def pointer_of(table, row, tensor, tensors, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in row `row` of the table, as a pointer to TYPE."""
    pointer = tl.load(table + row * tensors + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:  # allows 16-byte accesses: the compiler cannot tell this of an address read from memory
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def take(pointer, inside, FULL: tl.constexpr):
    """Elements of a chunk in fp32; full chunks are read without a mask, which would prevent 16-byte accesses."""
    chunk = tl.load(pointer) if FULL else tl.load(pointer, mask=inside, other=0.0)
    return chunk.to(tl.float32)


@triton.jit
def put(pointer, value, inside, FULL: tl.constexpr):
    """Store a chunk."""
    if FULL:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=inside)


@triton.jit
def put_copy(
    table, tensor, tensors, at, value, inside, NARROW: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr
):
    """Store a chunk of new weights into the tensor's low-precision copy, if it has one."""
    if tl.load(table + 2 * tensors + tensor) != 0:
        put(pointer_of(table, 2, tensor, tensors, NARROW, ALIGNED) + at, value.to(NARROW), inside, FULL)


@triton.jit
def partial_sum(partial, begin, end, BLOCK: tl.constexpr):
    """The sum of the partial sums of a tensor's chunks, `begin` to `end`."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(begin, end, BLOCK):
        chunk = at + tl.arange(0, BLOCK)
        total += tl.load(partial + chunk, mask=chunk < end, other=0.0)
    return tl.sum(total)
