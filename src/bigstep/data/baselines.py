"""What a language model has to beat: counts of tokens, and of pairs of tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bigstep.data.feed import Feed, Request
from bigstep.data.pair import DataPair
from bigstep.data.sources.base import Source
from bigstep.gpu.cross_entropy import is_counted

__all__ = ["ngram_bits"]

_MOST_TOKENS = 2**22  # of a text that are counted at most, so that it takes seconds
_BATCH = 1024  # windows that are read at once

Numbers = NDArray[np.int64]


def ngram_bits(pair: DataPair) -> dict[str, float | str]:
    """Return the bits that a unigram and a bigram model of the training text spend on each byte of the test text.

    p(y) = (count(y) + 1) / (tokens + vocabulary)
    p(y | x) = (count(x, y) + p(y)) / (count(x) + 1)

    Args:
        pair: two sources of tokens.

    Returns:
        unigram, bigram, and unit: "bits per byte", or "bits per token" if the bytes are not known.

    >>> import numpy as np
    >>> from bigstep.data.sources.text import TokenWindows
    >>> text = TokenWindows(tokens=np.frombuffer(b"ab" * 5000, np.uint8), length=100)
    >>> ngram_bits(DataPair(text, text))
    {'unigram': 1.036, 'bigram': 0.0, 'unit': 'bits per byte'}
    """
    tokens = pair.train.num_classes
    x, y, _ = _read(pair.train)
    p_unigram = (np.bincount(y, minlength=tokens) + 1) / (len(y) + tokens)
    seen, counts = np.unique(x * tokens + y, return_counts=True)
    seen, counts = np.append(seen, -1), np.append(counts, 0)  # the last stands for pairs that were never seen
    before = np.bincount(x, minlength=tokens)
    x, y, in_bytes = _read(pair.test)
    places = np.searchsorted(seen[:-1], x * tokens + y)
    together = np.where(seen[places] == x * tokens + y, counts[places], 0)
    p_bigram = (together + p_unigram[y]) / (before[x] + 1)
    spent = [float(-np.log2(p).sum()) for p in (p_unigram[y], p_bigram)]
    unigram, bigram = (round(bits / (in_bytes or len(y)), 3) for bits in spent)
    return {"unigram": unigram, "bigram": bigram, "unit": f"bits per {'byte' if in_bytes else 'token'}"}


def _read(source: Source) -> tuple[Numbers, Numbers, float]:
    """Return about `_MOST_TOKENS` tokens at most, the token after each, and the bytes of the latter (0: not known)."""
    feed = Feed(source, train=False)
    most = -(-_MOST_TOKENS // (_BATCH * feed.length))
    parts = feed.evaluation_batches(_BATCH)[:most]
    before, after, in_bytes = [], [], 0.0
    for indices, (x, y) in zip(parts, feed(Request(0, part) for part in parts), strict=True):
        kept = is_counted(y)
        before.append(x[kept].numpy())
        after.append(y[kept].numpy())
        counted = source.bytes(indices)
        in_bytes += 0.0 if counted is None else float(counted.sum())
    return np.concatenate(before), np.concatenate(after), in_bytes
