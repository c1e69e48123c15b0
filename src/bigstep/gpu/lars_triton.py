"""Triton kernels of LARS over all tensors of a model: partial norms, trust ratios, updates; three launches in all.

A chunk is up to CHUNK consecutive elements of one tensor. A table on the device, (5, tensors), holds the addresses of
weights, gradients, velocities and low-precision copies (0: none) and whether a gradient is in low precision, so that
one launch walks over all tensors. It has a column for each tensor, not for each chunk, so that it stays in the caches:
a table of chunks, read once by each program, made the update twice as slow on an H200.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["norms_kernel", "trust_kernel", "update_kernel"]


@triton.jit
def pointer_of(table, row, tensor, tensors, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in row `row` of the table, as a pointer to TYPE."""
    pointer = tl.load(table + row * tensors + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:  # lets the compiler use 16-byte accesses, which it cannot infer from an address in memory
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def take(pointer, size, FULL: tl.constexpr):
    """Elements of a chunk in fp32. A mask would keep the compiler from 16-byte accesses, so full chunks go without."""
    chunk = tl.load(pointer) if FULL else tl.load(pointer, mask=size, other=0.0)
    return chunk.to(tl.float32)


@triton.jit
def put(pointer, value, size, FULL: tl.constexpr):
    """Store a chunk."""
    if FULL:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=size)


@triton.jit
def squares(
    table,
    tensor,
    tensors,
    first,
    size,
    CHUNK: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    FULL: tl.constexpr,
):
    """Sums of squares of a chunk of weights and of their gradient."""
    at = first + tl.arange(0, CHUNK)
    w = take(pointer_of(table, 0, tensor, tensors, tl.float32, ALIGNED) + at, at < size, FULL)
    g = take(pointer_of(table, 1, tensor, tensors, GRAD, ALIGNED) + at, at < size, FULL)
    return tl.sum(w * w), tl.sum(g * g)


@triton.jit
def norms_kernel(
    table,
    chunk_tensor,
    chunk_first,
    sizes,
    partial,
    skipped,
    tensors,
    chunks,
    CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Sums of squares of each chunk of weights and gradients; partial is (2, chunks)."""
    chunk = tl.program_id(0)
    if chunk == 0:
        tl.store(skipped, 0.0)
    tensor = tl.load(chunk_tensor + chunk)
    first = tl.multiple_of(tl.load(chunk_first + chunk), 16)
    size = tl.load(sizes + tensor)
    if tl.load(table + 4 * tensors + tensor) != 0:
        if first + CHUNK <= size:
            w, g = squares(table, tensor, tensors, first, size, CHUNK, NARROW, ALIGNED, True)
        else:
            w, g = squares(table, tensor, tensors, first, size, CHUNK, NARROW, ALIGNED, False)
    elif first + CHUNK <= size:
        w, g = squares(table, tensor, tensors, first, size, CHUNK, tl.float32, ALIGNED, True)
    else:
        w, g = squares(table, tensor, tensors, first, size, CHUNK, tl.float32, ALIGNED, False)
    tl.store(partial + chunk, w)
    tl.store(partial + chunks + chunk, g)


@triton.jit
def trust_kernel(
    partial,
    first_chunk,
    settings,
    lr,
    scale,
    rates,
    skipped,
    tensors,
    chunks,
    BLOCK: tl.constexpr,
):
    """Store rates[0] = lr * lambda / scale, rates[1] = lr * lambda * decay of each tensor; skipped if not finite.

    settings is (5, tensors): weight decay, adapt, trust coefficient, eps, index into lr; `scale` is what the loss was
    multiplied by.
    """
    tensor = tl.program_id(0)
    begin = tl.load(first_chunk + tensor)
    end = tl.load(first_chunk + tensor + 1)
    w = tl.zeros((BLOCK,), dtype=tl.float32)
    g = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(begin, end, BLOCK):
        chunk = at + tl.arange(0, BLOCK)
        w += tl.load(partial + chunk, mask=chunk < end, other=0.0)
        g += tl.load(partial + chunks + chunk, mask=chunk < end, other=0.0)
    unscale = 1.0 / tl.load(scale)
    w_norm = tl.sqrt(tl.sum(w))
    g_norm = tl.sqrt(tl.sum(g)) * unscale
    decay = tl.load(settings + tensor)
    adapt = tl.load(settings + tensors + tensor)
    coefficient = tl.load(settings + 2 * tensors + tensor)
    eps = tl.load(settings + 3 * tensors + tensor)
    rate = tl.load(lr + tl.load(settings + 4 * tensors + tensor).to(tl.int32))
    adapted = (adapt != 0.0) & (w_norm > 0.0) & (g_norm > 0.0)
    trust = tl.where(adapted, coefficient * w_norm / (g_norm + decay * w_norm + eps), 1.0)
    tl.store(rates + tensor, rate * trust * unscale)
    tl.store(rates + tensors + tensor, rate * trust * decay)
    finite = g_norm <= 3.4e38  # false for inf and for nan
    tl.atomic_max(skipped, tl.where(finite, 0.0, 1.0))


@triton.jit
def update(
    table,
    rates,
    tensor,
    tensors,
    first,
    size,
    momentum,
    CHUNK: tl.constexpr,
    GRAD: tl.constexpr,
    NARROW: tl.constexpr,
    NESTEROV: tl.constexpr,
    COPIES: tl.constexpr,
    ALIGNED: tl.constexpr,
    FULL: tl.constexpr,
):
    """Apply u = rates0 * g + rates1 * w; v = momentum * v + u; w = w - v to a chunk."""
    at = first + tl.arange(0, CHUNK)
    inside = at < size
    w_at = pointer_of(table, 0, tensor, tensors, tl.float32, ALIGNED) + at
    v_at = pointer_of(table, 2, tensor, tensors, tl.float32, ALIGNED) + at
    w = take(w_at, inside, FULL)
    v = take(v_at, inside, FULL)
    g = take(pointer_of(table, 1, tensor, tensors, GRAD, ALIGNED) + at, inside, FULL)
    u = tl.load(rates + tensor) * g + tl.load(rates + tensors + tensor) * w
    v = momentum * v + u
    w -= momentum * v + u if NESTEROV else v
    put(v_at, v, inside, FULL)
    put(w_at, w, inside, FULL)
    if COPIES:  # noqa: SIM102  # decided when the kernel is compiled
        if tl.load(table + 3 * tensors + tensor) != 0:
            copy_at = pointer_of(table, 3, tensor, tensors, NARROW, ALIGNED) + at
            put(copy_at, w.to(NARROW), inside, FULL)


@triton.jit
def update_kernel(
    table,
    chunk_tensor,
    chunk_first,
    sizes,
    rates,
    skipped,
    scale,
    good_steps,
    growth_interval,
    momentum,
    tensors,
    chunks,
    CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
    NESTEROV: tl.constexpr,
    COPIES: tl.constexpr,
    DYNAMIC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update every chunk; nothing at all where `skipped` is set.

    With COPIES, tensors that have a low-precision copy get it rewritten. With DYNAMIC, the loss scale is halved after a
    skipped step and doubled after `growth_interval` good ones.
    """
    # from the last chunk to the first: the norms were taken in the other direction, so the L2 cache holds the end
    chunk = chunks - 1 - tl.program_id(0)
    skip = tl.load(skipped) != 0.0
    if DYNAMIC:  # noqa: SIM102  # decided when the kernel is compiled
        if tl.program_id(0) == 0:
            good = tl.where(skip, 0, tl.load(good_steps) + 1)
            grow = good >= growth_interval
            old = tl.load(scale)
            tl.store(scale, tl.where(skip, tl.maximum(old * 0.5, 1.0), tl.where(grow, old * 2.0, old)))
            tl.store(good_steps, tl.where(grow, 0, good))
    if not skip:
        tensor = tl.load(chunk_tensor + chunk)
        first = tl.multiple_of(tl.load(chunk_first + chunk), 16)
        size = tl.load(sizes + tensor)
        if tl.load(table + 4 * tensors + tensor) != 0:
            if first + CHUNK <= size:
                update(
                    table, rates, tensor, tensors, first, size, momentum,
                    CHUNK, NARROW, NARROW, NESTEROV, COPIES, ALIGNED, True,
                )  # fmt: skip
            else:
                update(
                    table, rates, tensor, tensors, first, size, momentum,
                    CHUNK, NARROW, NARROW, NESTEROV, COPIES, ALIGNED, False,
                )  # fmt: skip
        elif first + CHUNK <= size:
            update(
                table, rates, tensor, tensors, first, size, momentum,
                CHUNK, tl.float32, NARROW, NESTEROV, COPIES, ALIGNED, True,
            )  # fmt: skip
        else:
            update(
                table, rates, tensor, tensors, first, size, momentum,
                CHUNK, tl.float32, NARROW, NESTEROV, COPIES, ALIGNED, False,
            )  # fmt: skip
