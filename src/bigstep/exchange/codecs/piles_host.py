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
        self._wires: dict[tuple[int, ...], Tensor] = {}  # fresh memory costs more than what is written into it
        self._scratch = np.empty(0, np.int64)

    def add(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None, *, clear: bool = False) -> None:
        """Add a part of each parameter."""
        places, held = self._places(which), _as_floats(pieces)
        where, begin = kernels.Where.of(held), 0
        state = self._levels, self._broken, self._digits
        while (begin := kernels.add(where, places, self._offsets, self._sums, *state, begin, clear)) >= 0:
            # whoever gathers others' sums in another thread goes on with the rows as they were
            self._sums = np.concatenate([self._sums, np.empty((1, self._offsets[-1]), np.int64)])
        if clear and held is not pieces:
            torch._foreach_zero_(list(pieces))

    def levels(self, which: Sequence[int] | None = None) -> Tensor:
        """Return the highest level and minus the lowest of each."""
        places = self._places(which)
        held = self._levels[:, places]
        high, minus_low = held.max(0), np.where(held == EMPTY, EMPTY, -held).max(0)
        broken = self._broken[places]
        high[broken], minus_low[broken] = BROKEN, EMPTY
        return torch.from_numpy(np.stack([high, minus_low], axis=1).astype(np.int32).reshape(-1))

    def gather(self, agreed: Tensor, which: Sequence[int] | None = None) -> Tensor:
        """Write them into one row of integers, which is that of the same parameters' next call too."""
        places, (high, pairs) = self._places(which), spans_of(agreed.numpy())
        length, key = int((self._sizes[places] * pairs).sum()), tuple(places.tolist())
        if key not in self._wires or self._wires[key].numel() < length:
            self._wires[key] = torch.empty(length, dtype=torch.int64)
        wire = self._wires[key][:length]
        kernels.gather(self._sums, self._levels, places, self._offsets, high, pairs, wire.numpy())
        self._forget(places)
        return wire

    def spread(
        self, agreed: Tensor, wire: Tensor, pieces: Sequence[Tensor], which: Sequence[int] | None = None
    ) -> None:
        """Turn them into values."""
        high, pairs = spans_of(agreed.numpy())
        held = _as_floats(pieces)
        where, sizes = kernels.Where.of(held), self._sizes[self._places(which)]
        kernels.spread(wire.numpy(), sizes, high, pairs, self._digits, where.addresses, where.like)
        _give_back(held, pieces)

    def take(self, pieces: Sequence[Tensor]) -> None:
        """Write the sums of a rank that has all parts, one after another, while each is in the core's cache."""
        high, pairs = spans_of(self.levels().numpy())
        room, held = int((self._sizes * pairs).max()), _as_floats(pieces)
        if self._scratch.size < room:
            self._scratch = np.empty(room, np.int64)
        where = kernels.Where.of(held)
        state = self._sums, self._levels, self._offsets, high, pairs, self._digits
        kernels.take(*state, self._scratch, where.addresses, where.like)
        _give_back(held, pieces)
        self._forget(self._all)

    def _places(self, which: Sequence[int] | None) -> Any:
        return self._all if which is None else np.asarray(which, np.int64)

    def _forget(self, places: Any) -> None:
        self._levels[:, places] = EMPTY
        self._broken[places] = False


def _as_floats(pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pieces themselves where all are of float32, or all of float64; else copies in a type that has all their values.

    Numba knows no half types, and a kernel one type at a time.
    """
    types = {piece.dtype for piece in pieces}
    if types in ({torch.float32}, {torch.float64}):
        return pieces
    wide = torch.float64 if torch.float64 in types else torch.float32
    return [piece.to(wide, copy=True) for piece in pieces]


def _give_back(held: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Write copies that were filled into what they are copies of."""
    if held is not pieces:
        for piece, copy in zip(pieces, held, strict=True):
            piece.copy_(copy)
