"""Blocks of different lengths as the rows of one matrix: what block codes in plain torch share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bigstep.exchange.codecs import Blocks

__all__ = ["Rows", "find_places"]


@dataclass(frozen=True)
class Rows:
    """Blocks that lie one behind the other, seen as rows filled up with zeros."""

    inside: Tensor
    """Which places of the matrix hold a value."""

    @classmethod
    def of(cls, blocks: Blocks) -> Rows:
        """The rows of these blocks."""
        return cls(find_places(blocks.starts, blocks.lengths)[1])

    def spread(self, flat: Tensor) -> Tensor:
        """A flat tensor as rows."""
        rows = flat.new_zeros(self.inside.shape)
        return rows.masked_scatter_(self.inside, flat)

    def join(self, rows: Tensor) -> Tensor:
        """Rows as a flat tensor."""
        return rows.masked_select(self.inside)


def find_places(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The places start, start + 1, ... of each row, as many as the longest has; and which of them a row really has."""
    steps = torch.arange(int(counts.max()) if counts.numel() else 0, device=counts.device)
    return starts.unsqueeze(1) + steps, steps < counts.unsqueeze(1)
