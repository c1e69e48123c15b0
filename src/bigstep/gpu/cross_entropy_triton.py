"""Triton kernels of the cross-entropy of rows of logits: one read forward; one read and one write backward."""

# mypy: disable-error-code="no-untyped-def"
# Kernel arguments have no Python types: pointers and numbers of the device.
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cost_kernel", "gradient_kernel"]

LOWEST = tl.constexpr(-3.0e38)
"""Fills lanes without a logit: finite, so that differences are too, and beside any logit its exponential is 0."""


@triton.jit
def cost_kernel(
    logits, target, costs, spread, classes, smoothing, SMOOTHED: tl.constexpr, IGNORED: tl.constexpr, B: tl.constexpr
):
    """Store log sum exp(x) of a row and the cost of its target, which is 0 if the target does not count."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * classes
    best = tl.full((B,), LOWEST, tl.float32)  # each lane has its own maximum, and a sum relative to it
    sums = tl.zeros((B,), tl.float32)
    plain = tl.zeros((B,), tl.float32)
    for first in range(0, classes, B):
        c = first + tl.arange(0, B)
        ok = c < classes
        value = tl.where(ok, tl.load(x + c, mask=ok, other=0.0).to(tl.float32), LOWEST)
        higher = tl.maximum(best, value)
        sums = sums * tl.exp(best - higher) + tl.exp(value - higher)
        best = higher
        plain += tl.where(ok, value, 0.0)
    top = tl.max(best, 0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp(best - top), 0))
    wanted = tl.load(target + row)
    counted = wanted != IGNORED
    inside = (wanted >= 0) & (wanted < classes)  # a target out of range reads nothing and gives NaN
    hit = tl.load(x + tl.where(inside, wanted, 0), mask=inside, other=float("nan")).to(tl.float32)
    cost = log_sum - (1 - smoothing) * hit
    if SMOOTHED:  # left out without smoothing, where a logit of minus infinity must cost nothing
        cost -= smoothing * (tl.sum(plain, 0) / classes)
    tl.store(spread + row, log_sum)
    tl.store(costs + row, tl.where(counted, cost, 0.0))


@triton.jit
def gradient_kernel(
    logits, target, spread, slope, gradient, classes, smoothing, IGNORED: tl.constexpr, B: tl.constexpr
):
    """Store (softmax(x) - (1 - s) [target] - s / classes) times the slope, or 0 where the target does not count."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    ok = c < classes
    wanted = tl.load(target + row)
    value = tl.load(logits + row * classes + c, mask=ok, other=0.0).to(tl.float32)
    share = tl.exp(value - tl.load(spread + row)) - smoothing / classes
    share = tl.where(c == wanted, share - (1 - smoothing), share)
    tl.store(gradient + row * classes + c, tl.where(wanted != IGNORED, share * tl.load(slope), 0.0), mask=ok)
