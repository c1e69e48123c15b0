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
def gradient_of(table, tensor, tensors, at, inside, NARROW: tl.constexpr, ALIGNED: tl.constexpr):
    """A chunk of a gradient in fp32; row 4 of the table says where gradients are NARROW, the rest is fp32."""
    if tl.load(table + 4 * tensors + tensor) != 0:
        low = pointer_of(table, 1, tensor, tensors, NARROW, ALIGNED)
        g = tl.load(low + at, mask=inside, other=0.0).to(tl.float32)
    else:
        high = pointer_of(table, 1, tensor, tensors, tl.float32, ALIGNED)
        g = tl.load(high + at, mask=inside, other=0.0)
    return g


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
    at = tl.multiple_of(tl.load(chunk_first + chunk), 16) + tl.arange(0, CHUNK)
    inside = at < tl.load(sizes + tensor)
    w = tl.load(pointer_of(table, 0, tensor, tensors, tl.float32, ALIGNED) + at, mask=inside, other=0.0)
    g = gradient_of(table, tensor, tensors, at, inside, NARROW, ALIGNED)
    tl.store(partial + chunk, tl.sum(w * w))
    tl.store(partial + chunks + chunk, tl.sum(g * g))


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
    """Apply u = rates0 * g + rates1 * w; v = momentum * v + u; w = w - v; nothing at all where `skipped` is set.

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
        at = tl.multiple_of(tl.load(chunk_first + chunk), 16) + tl.arange(0, CHUNK)
        inside = at < tl.load(sizes + tensor)
        w_at = pointer_of(table, 0, tensor, tensors, tl.float32, ALIGNED) + at
        v_at = pointer_of(table, 2, tensor, tensors, tl.float32, ALIGNED) + at
        w = tl.load(w_at, mask=inside, other=0.0)
        v = tl.load(v_at, mask=inside, other=0.0)
        g = gradient_of(table, tensor, tensors, at, inside, NARROW, ALIGNED)
        u = tl.load(rates + tensor) * g + tl.load(rates + tensors + tensor) * w
        v = momentum * v + u
        w -= momentum * v + u if NESTEROV else v
        tl.store(v_at, v, mask=inside)
        tl.store(w_at, w, mask=inside)
        if COPIES:  # noqa: SIM102  # decided when the kernel is compiled
            if tl.load(table + 3 * tensors + tensor) != 0:
                copy_at = pointer_of(table, 3, tensor, tensors, NARROW, ALIGNED) + at
                tl.store(copy_at, w.to(NARROW), mask=inside)
