"""The largest values on the CPU: a selection in each chunk by magnitude, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigstep.exchange.codecs.onebit_numba import compiled

__all__ = ["decode_blocks", "encode_blocks"]


@compiled()
def _select(values: Any, place: int) -> Any:
    """The value that sorting `values` would put at `place`, by Hoare's selection, which reorders them.

    NumPy's `partition` does the same, but Numba takes six seconds to compile it with all that it needs.
    """
    low, high = 0, values.size - 1
    while low < high:
        pivot, i, j = values[(low + high) // 2], low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i, j = i + 1, j - 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:  # only the pivot lies between them
            break
    return values[place]


@compiled()
def encode_blocks(
    values: Any, kept: Any, starts: Any, lengths: Any, counts: Any, words_at: Any, words: Any, floats: Any
) -> None:
    """`TopK.encode` on contiguous arrays; `words` and `floats` are the message as int32 and as float32."""
    for b in range(starts.size):
        length, count = lengths[b], counts[b]
        v = values[starts[b] : starts[b] + length]
        r = kept[starts[b] : starts[b] + length]
        x, size, finite = np.empty_like(r), np.empty_like(r), True
        for i in range(length):
            x[i] = v[i] + r[i]
            size[i] = abs(x[i])
            if not size[i] < np.inf:  # NaN counts as the largest
                size[i], finite = np.inf, False
        least = _select(size.copy(), length - count)
        above = 0
        for i in range(length):
            above += size[i] > least
        equal, at = count - above, words_at[b]  # of those equal to the least, the first are sent
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
            for i in range(length):
                r[i] = x[i]


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
