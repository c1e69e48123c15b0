"""Small integers on the CPU: one pass for the largest value of a block and one for the rest, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigstep.exchange.codecs.onebit_numba import compiled

__all__ = ["decode_blocks", "encode_blocks"]


@compiled()
def encode_blocks(
    values: Any, kept: Any, starts: Any, lengths: Any, heads_at: Any, bodies_at: Any, message: Any, heads: Any,
    largest: int, pairs: bool,
) -> None:  # fmt: skip
    """`Int8.encode` on contiguous arrays; `heads` is `message` viewed as float32; `pairs` puts two values in a byte."""
    most, zero = values.dtype.type(largest), values.dtype.type(0)
    for b in range(starts.size):
        length = lengths[b]
        v = values[starts[b] : starts[b] + length]
        r = kept[starts[b] : starts[b] + length]
        top, finite = zero, True
        for i in range(length):
            size = abs(v[i] + r[i])
            top = max(top, size)
            finite &= size < np.inf
        scale = np.float32(top / most)
        heads[heads_at[b]] = scale if finite else np.float32(np.nan)
        if not finite:
            continue
        wide = values.dtype.type(scale)
        body = message[bodies_at[b] :]
        for i in range(length):
            x = v[i] + r[i]
            step = min(max(np.rint(x / wide), -most), most) if wide > zero else zero
            r[i] = x - step * wide
            if pairs:
                body[i // 2] |= np.uint8(np.int64(step) + 8) << np.uint8(4 * (i % 2))
            else:
                body[i] = np.uint8(np.int8(step))


@compiled()
def decode_blocks(
    messages: Any, heads: Any, starts: Any, lengths: Any, heads_at: Any, bodies_at: Any, out: Any,
    copies: int, stride: int, scale: float, pairs: bool,
) -> None:  # fmt: skip
    """`Int8.decode` on contiguous arrays; `heads` is `messages` viewed as float32."""
    factor = out.dtype.type(scale)
    for b in range(starts.size):
        o = out[starts[b] : starts[b] + lengths[b]]
        o[:] = 0
        for copy in range(copies):
            wide = out.dtype.type(heads[copy * stride // 4 + heads_at[b]])
            body = messages[copy * stride + bodies_at[b] :]
            if pairs:
                for i in range(o.size):
                    step = np.int64((body[i // 2] >> np.uint8(4 * (i % 2))) & np.uint8(15)) - 8
                    o[i] += out.dtype.type(step) * wide
            else:
                for i in range(o.size):
                    o[i] += out.dtype.type(np.int8(body[i])) * wide
        if scale != 1:
            for i in range(o.size):
                o[i] *= factor
