"""Blocks of different lengths as the rows of one matrix: what block codes in plain torch share.

On a GPU nothing here waits for the device, except when the counts of a table of blocks are first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bigstep.exchange.codecs import Blocks

__all__ = ["Counts", "Rows", "counts_of"]


@dataclass(frozen=True)
class Counts:
    """How many of something each block has."""

    each: Tensor
    most: int
    total: int


_known = WeakTensorKeyDictionary()  # tables of blocks live as long as their exchange


def counts_of(blocks: Blocks, what: object, count: Callable[[Tensor], Tensor] = Tensor.clone) -> Counts:
    """Return `count(lengths)`, found once per table; by default a copy, since keeping the lengths would keep the table.

    `what` is the key: it names the count and all else that it depends on.
    """
    known: dict[object, Counts] = _known.setdefault(blocks.lengths, {})  # type: ignore[no-untyped-call]  # torch's
    if what not in known:
        each = count(blocks.lengths)
        known[what] = Counts(each, int(each.max()) if each.numel() else 0, int(each.sum()))
    return known[what]


@dataclass(frozen=True)
class Rows:
    """Pieces of a flat tensor, one for each block, viewed as rows padded with zeros."""

    counts: Counts
    at: Tensor
    """Where each value lies in the flat tensor, row after row."""
    places: Tensor
    """Where each value lies in the flattened matrix of rows."""

    @classmethod
    def of(cls, starts: Tensor, counts: Counts) -> Rows:
        """The rows of pieces that begin at `starts`."""
        row = torch.repeat_interleave(counts.each, output_size=counts.total)
        firsts = counts.each.cumsum(0) - counts.each
        column = torch.arange(counts.total, device=row.device) - firsts[row]
        return cls(counts, starts[row] + column, row * counts.most + column)

    @property
    def inside(self) -> Tensor:
        """Which places of the matrix hold a value."""
        return torch.arange(self.counts.most, device=self.at.device) < self.counts.each.unsqueeze(1)

    def spread(self, values: Tensor) -> Tensor:
        """Values, row after row, as a matrix."""
        shape = len(self.counts.each), self.counts.most
        return values.new_zeros(shape[0] * shape[1]).index_copy_(0, self.places, values).view(shape)

    def join(self, rows: Tensor) -> Tensor:
        """The values of a matrix, row after row."""
        return rows.reshape(-1)[self.places]
