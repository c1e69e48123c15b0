"""The largest values on the CPU: a partition of each chunk by magnitude, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigstep.exchange.codecs.onebit_numba import compiled

__all__ = ["decode_blocks", "encode_blocks"]


@compiled()
def encode_blocks(
    values: Any, kept: Any, starts: Any, lengths: Any, counts: Any, words_at: Any, words: Any, floats: Any
) -> None:
    """`TopK.encode` on contiguous arrays; `words` and `floats` are the message as int32 and as float32."""
    for b in range(starts.size):
        length, count = lengths[b], counts[b]
        r = kept[starts[b] : starts[b] + length]
        x = values[starts[b] : starts[b] + length] + r
        size = np.abs(x)
        finite = True
        for i in range(length):
            if not size[i] < np.inf:  # NaN counts as the largest
                size[i], finite = np.inf, False
        least = np.partition(size, length - count)[length - count]
        above = 0
        for i in range(length):
            above += size[i] > least
        equal, at = count - above, words_at[b]  # of those equal to the least, the first
        for i in range(length):
            chosen = size[i] > least
            if size[i] == least and equal > 0:
                chosen, equal = True, equal - 1
            if chosen:
                floats[at] = x[i]
                word = words[at]
                if word & 0x7FFFFFFF < 0x7F800000:  # finite: round to the nearest bfloat16, ties to even
                    word += 0x7FFF + ((word >> 16) & 1)
                words[at] = word & -0x10000
                finite &= abs(floats[at]) < np.inf
                x[i] -= floats[at]
                words[at] |= i
                at += 1
        if finite:
            r[:] = x


@compiled()
def decode_blocks(
    words: Any, starts: Any, counts: Any, words_at: Any, out: Any, copies: int, stride: int, scale: float
) -> None:
    """`TopK.decode` on contiguous arrays; `words` are the messages as int32, `stride` of them apart."""
    out[:] = 0
    value = np.empty(1, np.int32)
    for copy in range(copies):
        for b in range(starts.size):
            for at in range(copy * stride + words_at[b], copy * stride + words_at[b] + counts[b]):
                value[0] = words[at] & -0x10000
                out[starts[b] + (words[at] & 0xFFFF)] += value.view(np.float32)[0]
    if scale != 1:
        out *= out.dtype.type(scale)
