"""Triton kernels of LARS over all tensors of a model: partial norms, trust ratios, updates; three launches in all.

A table on the device holds the addresses of all tensors; see `bigstep.gpu.chunks.Chunks`. Row 4 holds those of
the velocities.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

from bigstep.gpu.chunks_triton import partial_sum, pointer_of, put, put_copy, take

__all__ = ["norms_kernel", "trust_kernel", "update_kernel"]


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
    """The sums of squares of a chunk of weights and of its gradients."""
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
    tensors,
    chunks,
    CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store the sums of squares of each chunk of weights and of gradients; partial is (2, chunks)."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    first = tl.multiple_of(tl.load(chunk_first + chunk), 16)
    size = tl.load(sizes + tensor)
    if tl.load(table + 3 * tensors + tensor) != 0:
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
    factor,
    rates,
    tensors,
    chunks,
    BLOCK: tl.constexpr,
):
    """Store rates[0] = lr * lambda * factor and rates[1] = lr * lambda * decay of each tensor.

    settings is (5, tensors): weight decay, adapt, trust coefficient, eps and index into lr.
    Gradients are multiplied by `factor`.
    """
    tensor = tl.program_id(0)
    begin = tl.load(first_chunk + tensor)
    end = tl.load(first_chunk + tensor + 1)
    times = tl.load(factor)
    w_norm = tl.sqrt(partial_sum(partial, begin, end, BLOCK))
    g_norm = tl.sqrt(partial_sum(partial + chunks, begin, end, BLOCK)) * times
    decay = tl.load(settings + tensor)
    adapt = tl.load(settings + tensors + tensor)
    coefficient = tl.load(settings + 2 * tensors + tensor)
    eps = tl.load(settings + 3 * tensors + tensor)
    rate = tl.load(lr + tl.load(settings + 4 * tensors + tensor).to(tl.int32))
    adapted = (adapt != 0.0) & (w_norm > 0.0) & (g_norm > 0.0)
    trust = tl.where(adapted, coefficient * w_norm / (g_norm + decay * w_norm + eps), 1.0)
    tl.store(rates + tensor, rate * trust * times)
    tl.store(rates + tensors + tensor, rate * trust * decay)


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
    v_at = pointer_of(table, 4, tensor, tensors, tl.float32, ALIGNED) + at
    w = take(w_at, inside, FULL)
    v = take(v_at, inside, FULL)
    g = take(pointer_of(table, 1, tensor, tensors, GRAD, ALIGNED) + at, inside, FULL)
    u = tl.load(rates + tensor) * g + tl.load(rates + tensors + tensor) * w
    v = momentum * v + u
    w -= momentum * v + u if NESTEROV else v
    put(v_at, v, inside, FULL)
    put(w_at, w, inside, FULL)
    if COPIES:
        put_copy(table, tensor, tensors, at, w, inside, NARROW, ALIGNED, FULL)


@triton.jit
def update_kernel(
    table,
    chunk_tensor,
    chunk_first,
    sizes,
    rates,
    skipped,
    momentum,
    tensors,
    chunks,
    CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
    NESTEROV: tl.constexpr,
    COPIES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update every chunk, and with COPIES the low-precision copies; change nothing if `skipped` is set."""
    # from the last chunk to the first: the norms went the other way, so the L2 cache still holds the last chunks
    chunk = chunks - 1 - tl.program_id(0)
    if tl.load(skipped) == 0.0:
        tensor = tl.load(chunk_tensor + chunk)
        first = tl.multiple_of(tl.load(chunk_first + chunk), 16)
        size = tl.load(sizes + tensor)
        if tl.load(table + 3 * tensors + tensor) != 0:
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
