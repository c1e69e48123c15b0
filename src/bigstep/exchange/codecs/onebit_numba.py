"""1-bit encoding and decoding on the CPU: one pass over memory, compiled by Numba, without the GIL.

Values and residuals are read once from memory. What follows once the means of a block are known, after its last value
(bits and residual), works on a copy of the block that stays in the core's cache. All inner loops run over neighbouring
values without branches, so that they become vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

__all__ = ["compiled", "decode_blocks", "encode_blocks"]

# Sums may be reordered (that is what makes them vector sums); NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}

F = TypeVar("F", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[F], F]:
    """Compile to run without the GIL; cache the machine code on disk if it can be written there."""

    def decorate(function: F) -> F:
        try:
            return numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)  # type: ignore[no-any-return]
        except RuntimeError:  # a read-only installation without a writable cache folder: compile in each process
            return numba.njit(nogil=True, error_model="numpy", **options)(function)  # type: ignore[no-any-return]

    return decorate


@compiled(inline="always")
def _sign(x: Any, shift: int) -> Any:
    return np.uint8(x >= 0) << np.uint8(shift)


@compiled(fastmath=_FAST)
def encode_blocks(
    values: Any, residual: Any, starts: Any, lengths: Any, means_at: Any, bits_at: Any, message: Any, means: Any
) -> None:
    """`OneBit.encode` on contiguous arrays; `means` is `message` viewed as float32."""
    if starts.size == 0:
        return
    zero, half = values.dtype.type(0), values.dtype.type(0.5)
    x = np.empty(lengths.max() + 8, values.dtype)
    for b in range(starts.size):
        length = lengths[b]
        row = (length + 7) // 8
        v = values[starts[b] : starts[b] + length]
        r = residual[starts[b] : starts[b] + length]
        positive, negative, count = zero, zero, np.int32(0)
        for i in range(length):
            t = v[i] + r[i]
            x[i] = t
            positive += t + abs(t)  # 2t or 0, exactly; a conditional sum would not become a vector sum (4x slower)
            negative += t - abs(t)
            count += np.int32(t >= 0)
        x[length : 8 * row] = -1  # pads the last byte with zero bits
        bits = message[bits_at[b] : bits_at[b] + row]
        for j in range(row):
            low = _sign(x[j], 0) | _sign(x[j + row], 1) | _sign(x[j + 2 * row], 2) | _sign(x[j + 3 * row], 3)
            high = _sign(x[j + 4 * row], 4) | _sign(x[j + 5 * row], 5) | _sign(x[j + 6 * row], 6)
            bits[j] = low | high | _sign(x[j + 7 * row], 7)
        r1 = np.float32(half * positive / max(count, 1))
        r0 = np.float32(half * negative / max(length - count, 1))
        total = positive + negative
        if -np.inf < total < np.inf:  # np.isfinite is total - total == 0, which reassociation turns into true
            for i in range(length):
                r[i] = x[i] - (r1 if x[i] >= 0 else r0)
        else:
            r0 = r1 = np.float32(np.nan)
        means[means_at[b]] = r0
        means[means_at[b] + 1] = r1


@compiled()
def decode_blocks(
    messages: Any, means: Any, starts: Any, lengths: Any, means_at: Any, bits_at: Any,
    out: Any, copies: int, stride: int, scale: float,
) -> None:  # fmt: skip
    """`OneBit.decode` on contiguous arrays; `means` is `messages` viewed as float32."""
    factor = out.dtype.type(scale)
    for b in range(starts.size):
        length = lengths[b]
        row = (length + 7) // 8
        o = out[starts[b] : starts[b] + length]
        for copy in range(copies):
            at = copy * stride
            r0 = out.dtype.type(means[at // 4 + means_at[b]])
            r1 = out.dtype.type(means[at // 4 + means_at[b] + 1])
            bits = messages[at + bits_at[b] : at + bits_at[b] + row]
            for k in range(8):
                plane = o[k * row : min((k + 1) * row, length)]
                if copy == 0:
                    for j in range(plane.size):
                        plane[j] = r1 if (bits[j] >> k) & 1 else r0
                else:
                    for j in range(plane.size):
                        plane[j] += r1 if (bits[j] >> k) & 1 else r0
        if scale != 1:
            for i in range(length):
                o[i] *= factor
