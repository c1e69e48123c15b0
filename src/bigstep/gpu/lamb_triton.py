"""Triton kernels of LAMB over all tensors of a model: corrections, moments, ratios, updates; four launches in all.

If no tensor is adapted, as in AdamW, the launch of the moments also applies the update, and two launches are enough.

A table on the device holds the addresses of all tensors; see `bigstep.gpu.chunks.Chunks`. Rows 4, 5 and 6 hold
those of the first moments, the second moments and the step counts. The direction u is not stored between the two
passes: the second one recomputes it from the moments, which moves one tensor less.

settings is (8, tensors): weight decay, adapt, eps, index into lr, beta1, beta2 and the logarithms of both.
"""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and integers of the device.
from __future__ import annotations

import triton
import triton.language as tl

from bigstep.gpu.chunks_triton import partial_sum, pointer_of, put, put_copy, take

__all__ = ["corrections_kernel", "moments_kernel", "ratios_kernel", "update_kernel"]


@triton.jit
def corrections_kernel(table, settings, lr, skipped, corrections, rates, tensors):
    """Count the step, unless it is skipped; store 1 / (1 - beta^t) of both moments and the rate before adaptation.

    corrections is (2, tensors).
    """
    tensor = tl.program_id(0)
    tl.store(rates + tensor, tl.load(lr + tl.load(settings + 3 * tensors + tensor).to(tl.int32)))
    step_at = pointer_of(table, 6, tensor, tensors, tl.float32, False)
    t = tl.load(step_at) + 1.0
    if tl.load(skipped) == 0.0:
        tl.store(step_at, t)
    wide = t.to(tl.float64)  # beta^t is near 1 in the first steps: in fp32 the difference would keep only four digits
    first = 1.0 - tl.exp(wide * tl.load(settings + 6 * tensors + tensor).to(tl.float64))
    second = 1.0 - tl.exp(wide * tl.load(settings + 7 * tensors + tensor).to(tl.float64))
    tl.store(corrections + tensor, (1.0 / first).to(tl.float32))
    tl.store(corrections + tensors + tensor, (1.0 / second).to(tl.float32))


@triton.jit
def direction(w, m, v, settings, corrections, tensor, tensors):
    """The direction u = m_hat / (sqrt(v_hat) + eps) + decay * w."""
    decay = tl.load(settings + tensor)
    eps = tl.load(settings + 2 * tensors + tensor)
    m_hat = m * tl.load(corrections + tensor)
    v_hat = v * tl.load(corrections + tensors + tensor)
    return m_hat / (tl.sqrt(v_hat) + eps) + decay * w


@triton.jit
def moments(
    table,
    settings,
    corrections,
    rates,
    times,
    tensor,
    tensors,
    first,
    size,
    CHUNK: tl.constexpr,
    GRAD: tl.constexpr,
    NARROW: tl.constexpr,
    APPLY: tl.constexpr,
    COPIES: tl.constexpr,
    ALIGNED: tl.constexpr,
    FULL: tl.constexpr,
):
    """Update both moments of a chunk, and with APPLY the weights; return the sums of squares of weights and of u."""
    at = first + tl.arange(0, CHUNK)
    inside = at < size
    w_at = pointer_of(table, 0, tensor, tensors, tl.float32, ALIGNED) + at
    m_at = pointer_of(table, 4, tensor, tensors, tl.float32, ALIGNED) + at
    v_at = pointer_of(table, 5, tensor, tensors, tl.float32, ALIGNED) + at
    g = times * take(pointer_of(table, 1, tensor, tensors, GRAD, ALIGNED) + at, inside, FULL)
    w = take(w_at, inside, FULL)
    m = take(m_at, inside, FULL)
    v = take(v_at, inside, FULL)
    beta1 = tl.load(settings + 4 * tensors + tensor)
    beta2 = tl.load(settings + 5 * tensors + tensor)
    m += (1.0 - beta1) * (g - m)
    v += (1.0 - beta2) * (g * g - v)
    put(m_at, m, inside, FULL)
    put(v_at, v, inside, FULL)
    u = direction(w, m, v, settings, corrections, tensor, tensors)
    squares = tl.sum(w * w), tl.sum(u * u)
    if APPLY:
        w -= tl.load(rates + tensor) * u
        put(w_at, w, inside, FULL)
        if COPIES:
            put_copy(table, tensor, tensors, at, w, inside, NARROW, ALIGNED, FULL)
    return squares


@triton.jit
def moments_kernel(
    table,
    chunk_tensor,
    chunk_first,
    sizes,
    settings,
    corrections,
    rates,
    factor,
    skipped,
    partial,
    tensors,
    chunks,
    CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
    APPLY: tl.constexpr,
    COPIES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update the moments with `factor` times the gradients; partial (2, chunks): sums of squares of weights and u."""
    chunk = tl.program_id(0)
    if tl.load(skipped) == 0.0:
        tensor = tl.load(chunk_tensor + chunk)
        first = tl.multiple_of(tl.load(chunk_first + chunk), 16)
        size = tl.load(sizes + tensor)
        times = tl.load(factor)
        if tl.load(table + 3 * tensors + tensor) != 0:
            if first + CHUNK <= size:
                w, u = moments(
                    table, settings, corrections, rates, times, tensor, tensors, first, size,
                    CHUNK, NARROW, NARROW, APPLY, COPIES, ALIGNED, True,
                )  # fmt: skip
            else:
                w, u = moments(
                    table, settings, corrections, rates, times, tensor, tensors, first, size,
                    CHUNK, NARROW, NARROW, APPLY, COPIES, ALIGNED, False,
                )  # fmt: skip
        elif first + CHUNK <= size:
            w, u = moments(
                table, settings, corrections, rates, times, tensor, tensors, first, size,
                CHUNK, tl.float32, NARROW, APPLY, COPIES, ALIGNED, True,
            )  # fmt: skip
        else:
            w, u = moments(
                table, settings, corrections, rates, times, tensor, tensors, first, size,
                CHUNK, tl.float32, NARROW, APPLY, COPIES, ALIGNED, False,
            )  # fmt: skip
        if not APPLY:
            tl.store(partial + chunk, w)
            tl.store(partial + chunks + chunk, u)


@triton.jit
def ratios_kernel(partial, first_chunk, settings, rates, tensors, chunks, BLOCK: tl.constexpr):
    """Multiply the rate of each tensor by |w| / |u|, unless a norm is 0 or the tensor is not adapted."""
    tensor = tl.program_id(0)
    begin = tl.load(first_chunk + tensor)
    end = tl.load(first_chunk + tensor + 1)
    w_norm = tl.sqrt(partial_sum(partial, begin, end, BLOCK))
    u_norm = tl.sqrt(partial_sum(partial + chunks, begin, end, BLOCK))
    adapt = tl.load(settings + tensors + tensor)
    adapted = (adapt != 0.0) & (w_norm > 0.0) & (u_norm > 0.0)
    tl.store(rates + tensor, tl.load(rates + tensor) * tl.where(adapted, w_norm / u_norm, 1.0))


@triton.jit
def update(
    table,
    settings,
    corrections,
    rates,
    tensor,
    tensors,
    first,
    size,
    CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
    COPIES: tl.constexpr,
    ALIGNED: tl.constexpr,
    FULL: tl.constexpr,
):
    """Apply w = w - rate * u to a chunk."""
    at = first + tl.arange(0, CHUNK)
    inside = at < size
    w_at = pointer_of(table, 0, tensor, tensors, tl.float32, ALIGNED) + at
    w = take(w_at, inside, FULL)
    m = take(pointer_of(table, 4, tensor, tensors, tl.float32, ALIGNED) + at, inside, FULL)
    v = take(pointer_of(table, 5, tensor, tensors, tl.float32, ALIGNED) + at, inside, FULL)
    w -= tl.load(rates + tensor) * direction(w, m, v, settings, corrections, tensor, tensors)
    put(w_at, w, inside, FULL)
    if COPIES:
        put_copy(table, tensor, tensors, at, w, inside, NARROW, ALIGNED, FULL)


@triton.jit
def update_kernel(
    table,
    chunk_tensor,
    chunk_first,
    sizes,
    settings,
    corrections,
    rates,
    skipped,
    tensors,
    chunks,
    CHUNK: tl.constexpr,
    NARROW: tl.constexpr,
    COPIES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update every chunk, and with COPIES the low-precision copies; change nothing if `skipped` is set."""
    # from the last chunk to the first: the moments went the other way, so the L2 cache still holds the last chunks
    chunk = chunks - 1 - tl.program_id(0)
    if tl.load(skipped) == 0.0:
        tensor = tl.load(chunk_tensor + chunk)
        first = tl.multiple_of(tl.load(chunk_first + chunk), 16)
        size = tl.load(sizes + tensor)
        if first + CHUNK <= size:
            update(
                table, settings, corrections, rates, tensor, tensors, first, size, CHUNK, NARROW, COPIES, ALIGNED, True
            )
        else:
            update(
                table, settings, corrections, rates, tensor, tensors, first, size, CHUNK, NARROW, COPIES, ALIGNED, False
            )
