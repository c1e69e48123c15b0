"""Piles of integers on the CPU: all parameters of a part in one compiled pass, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigstep.exchange.codecs import piles_numba as kernels
from bigstep.exchange.codecs.levels import BITS, BROKEN, EMPTY, LEVELS, spans_of
from bigstep.exchange.codecs.powers import spare_bits

__all__ = ["HostPiles"]


class HostPiles:
    """`bigstep.exchange.codecs.piles.Piles` of a small network take longer to call for than to compute; these do not.

    What parameters have on any level lies in rows as long as all of them: `_levels[row, p]` says on which level stands
    what the row holds of parameter p. Rows are added when a parameter first needs another, and kept.

    Args:
        sizes: Values of each parameter.
        parts: How many parts a sum has in all.
    """

    def __init__(self, sizes: Sequence[int], parts: int) -> None:
        self._offsets = np.cumsum([0, *sizes])
        self._sizes = np.diff(self._offsets)
        self._digits = BITS - spare_bits(parts)
        self._levels = np.full((LEVELS, len(sizes)), EMPTY, np.int64)
        self._broken = np.zeros(len(sizes), np.bool_)
        self._sums = np.empty((0, self._offsets[-1]), np.int64)
        self._all = np.arange(len(sizes))

    def add(self, flat: Tensor, which: Sequence[int] | None = None) -> None:
        """Add a part of each parameter."""
        places, values = self._places(which), kernels.as_array(flat)
        begin = done = 0
        state = self._levels, self._broken, self._digits
        while (stuck := kernels.add(values[done:], places[begin:], self._offsets, self._sums, *state)) >= 0:
            done += int(self._sizes[places[begin : begin + stuck]].sum())
            begin += stuck
            # whoever gathers others' sums in another thread goes on with the rows as they were
            self._sums = np.concatenate([self._sums, np.empty((1, self._offsets[-1]), np.int64)])

    def levels(self, which: Sequence[int] | None = None) -> Tensor:
        """Return the highest level and minus the lowest of each."""
        places = self._places(which)
        held = self._levels[:, places]
        high, minus_low = held.max(0, initial=EMPTY), np.where(held == EMPTY, EMPTY, -held).max(0, initial=EMPTY)
        broken = self._broken[places]
        high[broken], minus_low[broken] = BROKEN, EMPTY
        return torch.from_numpy(np.stack([high, minus_low], axis=1).astype(np.int32).reshape(-1))

    def gather(self, agreed: Tensor, which: Sequence[int] | None = None) -> Tensor:
        """Write them into one row of integers."""
        places, (high, pairs) = self._places(which), spans_of(agreed.numpy())
        wire = torch.empty(int((self._sizes[places] * pairs).sum()), dtype=torch.int64)
        kernels.gather(self._sums, self._levels, places, self._offsets, high, pairs, wire.numpy())
        self._levels[:, places] = EMPTY
        self._broken[places] = False
        return wire

    def spread(self, agreed: Tensor, wire: Tensor, out: Tensor, which: Sequence[int] | None = None) -> None:
        """Turn them into values."""
        high, pairs = spans_of(agreed.numpy())
        values = kernels.as_array(out)
        kernels.spread(wire.numpy(), self._sizes[self._places(which)], high, pairs, self._digits, values)
        if out.element_size() == 2:  # a half type, of which that was a copy
            out.copy_(torch.from_numpy(values))

    def _places(self, which: Sequence[int] | None) -> Any:
        return self._all if which is None else np.asarray(which, np.int64)
