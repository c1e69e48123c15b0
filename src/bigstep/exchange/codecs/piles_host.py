"""Piles of integers on the CPU: all parameters of a part in one compiled pass, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigstep.exchange.codecs import piles_numba as kernels
from bigstep.exchange.codecs.levels import BITS, EMPTY, LEVELS, spans_of
from bigstep.exchange.codecs.powers import spare_bits

__all__ = ["HostPiles"]


_NOWHERE = kernels.Where(np.empty((0, 0), np.int64), np.empty(0, np.float32), np.empty(0, np.int32), np.int32(0), 0)


@dataclass(frozen=True)
class _Waiting:
    """Parts of some parameters that are in no row yet."""

    parts: Sequence[Sequence[Tensor]]
    where: kernels.Where
    levels: Any
    """A row for each part."""


class HostPiles:
    """`bigstep.exchange.codecs.piles.Piles` on the CPU, where calls would cost a small network more than arithmetic.

    Sums lie in rows as long as all parameters together: `_levels[row, p]` is the level of what the row holds of
    parameter p. Rows are added when a parameter first needs another, and kept.

    A row takes twice the memory of a part, and reading and writing it takes longer than all arithmetic. So up to two
    parts, that of an earlier worker and the last, wait in their own tensors until another pass can add them.

    Args:
        sizes: Number of values of each parameter.
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
        self._wires: dict[tuple[int, ...], Tensor] = {}  # kept: new memory costs more than writing to it
        self._held: Sequence[Tensor] | None = None  # a part of all parameters that waits
        self._holds = np.zeros(len(sizes), np.bool_)  # for which parameters it is in no sum yet
        self._last: dict[tuple[int, ...], _Waiting] = {}  # by the parameters that are gathered together

    def add(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None) -> None:
        """Add a part of each parameter."""
        self._fold(self._places(which), _as_floats(pieces))

    def hold(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None) -> None:
        """Let one part of all parameters wait for the next, then add both."""
        part = _as_floats(pieces)
        if which is None and self._held is None:
            self._held, self._holds[:] = part, True
        elif which is None and self._held is not None and self._held[0].dtype == part[0].dtype:
            held, self._held = self._held, None
            self._fold(self._all, held, part)
        else:
            self._fold(self._places(which), part)

    def add_last(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None) -> Tensor:
        """Find the levels of the last part of each parameter; `gather` and `take` add it."""
        places, part = self._places(which), _as_floats(pieces)
        if self._held is not None and self._held[0].dtype != part[0].dtype:
            held, left = self._held, np.flatnonzero(self._holds)
            self._held = None
            self._fold(left, [held[place] for place in left.tolist()])
        self._last[tuple(places.tolist())] = self._look(places, part)
        return self.levels(which)

    def levels(self, which: Sequence[int] | None = None) -> Tensor:
        """Return the highest level of each parameter, and minus the lowest."""
        places = self._places(which)
        out = np.empty(2 * places.size, np.int32)
        kernels.span(self._levels[: len(self._sums)], self._broken, places, self._waiting(places).levels, out)
        return torch.from_numpy(out)

    def gather(self, agreed: Tensor, which: Sequence[int] | None = None, into: Tensor | None = None) -> Tensor:
        """Write the sums into one row of integers, which the next call for the same parameters reuses."""
        places, (high, pairs) = self._places(which), spans_of(agreed.numpy())
        length = int((self._sizes[places] * pairs).sum())
        wire = (self._wire(places, length) if into is None else into)[:length]
        rows, waiting = (self._sums, self._levels, places, self._offsets), self._waiting(places)
        parts = waiting.where.addresses, waiting.levels, waiting.where.like
        kernels.gather(*rows, high, pairs, self._digits, *parts, wire.numpy())
        self._forget(places)
        return wire

    def spread(
        self, agreed: Tensor, wires: Sequence[Tensor], pieces: Sequence[Tensor], which: Sequence[int] | None = None
    ) -> None:
        """Turn the sums into values."""
        high, pairs = spans_of(agreed.numpy())
        held = _as_floats(pieces)
        where, sizes = kernels.Where.of(held), self._sizes[self._places(which)]
        rows = np.array([wire.data_ptr() for wire in wires])
        kernels.spread(rows, sizes, high, pairs, self._digits, where.addresses[0], where.like)
        _give_back(held, pieces)

    def take(self, pieces: Sequence[Tensor]) -> None:
        """Write the sums of a rank that has all parts, parameter by parameter, while each is in the core's cache."""
        high, pairs = spans_of(self.levels().numpy())
        out, waiting = _as_floats(pieces), self._waiting(self._all)
        where = kernels.Where.of(out)
        rows = self._sums, self._levels, self._offsets
        parts = waiting.where.addresses, waiting.levels, waiting.where.like
        kernels.take(*rows, high, pairs, self._digits, *parts, where.addresses[0], where.like)
        _give_back(out, pieces)
        self._forget(self._all)

    def _fold(self, places: Any, *parts: Sequence[Tensor]) -> None:
        """Add parts of one type to rows."""
        where, begin = kernels.Where.of(*parts), 0
        values = where.addresses, where.like, where.bits, where.mask, where.point
        state = self._levels, self._broken, self._digits
        while (begin := kernels.add(*values, places, self._offsets, self._sums, *state, begin)) >= 0:
            self._sums = np.concatenate([self._sums, np.empty((1, self._offsets[-1]), np.int64)])

    def _look(self, places: Any, *parts: Sequence[Tensor]) -> _Waiting:
        """Find the levels of parts of some parameters, and of the part that is held."""
        held = self._held
        parts = parts if held is None else (*parts, [held[place] for place in places.tolist()])
        levels = np.empty((len(parts), places.size), np.int64)
        where = kernels.Where.of(*parts) if parts else _NOWHERE
        if parts:
            kernels.find_levels(where.addresses, where.bits, where.mask, where.point, self._sizes[places], levels)
        if held is not None:
            levels[-1, ~self._holds[places]] = EMPTY
        return _Waiting(parts, where, levels)

    def _waiting(self, places: Any) -> _Waiting:
        """The parts that are in no row: the last ones with the held one, or else the held one alone."""
        return self._last.get(tuple(places.tolist())) or self._look(places)

    def _wire(self, places: Any, length: int) -> Tensor:
        key = tuple(places.tolist())
        if key not in self._wires or self._wires[key].numel() < length:
            self._wires[key] = torch.empty(length, dtype=torch.int64)
        return self._wires[key]

    def _places(self, which: Sequence[int] | None) -> Any:
        return self._all if which is None else np.asarray(which, np.int64)

    def _forget(self, places: Any) -> None:
        self._levels[:, places] = EMPTY
        self._broken[places] = False
        self._last.pop(tuple(places.tolist()), None)
        self._holds[places] = False
        if not self._holds.any():
            self._held = None


def _as_floats(pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The pieces themselves if all are float32, or all float64; else copies in a type that holds all their values.

    Numba does not support half types, and a kernel takes one type at a time.
    """
    types = {piece.dtype for piece in pieces}
    if types in ({torch.float32}, {torch.float64}):
        return pieces
    wide = torch.float64 if torch.float64 in types else torch.float32
    return [piece.to(wide, copy=True) for piece in pieces]


def _give_back(held: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Write the values of copies, if there are any, back into the pieces."""
    if held is not pieces:
        for piece, copy in zip(pieces, held, strict=True):
            piece.copy_(copy)
