"""Piles of integers on a GPU: a few launches per part for all parameters, whose exponents the host reads once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigstep.exchange.codecs.levels import BITS, BROKEN, EMPTY, LEAST, LEVELS, WIDTH, spans_of
from bigstep.exchange.codecs.powers import NOT_FINITE, spare_bits

__all__ = ["DevicePiles"]


class DevicePiles:
    """`bigstep.exchange.codecs.piles.Piles` for any device.

    Sums lie in rows as long as all parameters together: `_levels[row, p]`, on the host, is the level of what the row
    holds of parameter p. Where a row holds nothing, it is 0, so that parts are only ever added.

    Args:
        sizes: Number of values of each parameter.
        parts: How many parts a sum has in all.
    """

    def __init__(self, sizes: Sequence[int], parts: int) -> None:
        self._sizes, self._digits = tuple(sizes), BITS - spare_bits(parts)
        self._levels = np.full((LEVELS, len(sizes)), EMPTY, np.int64)
        self._broken = np.zeros(len(sizes), np.bool_)
        self._sums: list[Tensor] = []
        self._device = torch.device("cpu")

    def add(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None) -> None:
        """Add a part of each parameter."""
        places, sizes = self._places(which)
        flat = torch.cat([piece.as_strided((piece.numel(),), (1,)) for piece in pieces])
        self._device = flat.device
        exponents = _find_exponents(flat, sizes).cpu().numpy()  # the host waits only here
        self._broken[places[exponents == NOT_FINITE]] = True
        rows, factors = self._find_rows(places, exponents)
        for row in np.unique(rows[rows >= 0]).tolist():
            factor = self._by_value(np.where(rows == row, factors, 0.0), sizes)
            integers = (flat.double() * factor).round_().long()
            while row >= len(self._sums):
                self._sums.append(torch.zeros(sum(self._sizes), dtype=torch.int64, device=flat.device))
            if which is None:
                self._sums[row] += integers
            else:
                torch._foreach_add_(self._pieces(row, which), list(integers.split_with_sizes(sizes)))

    def hold(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None) -> None:
        """Add it at once."""
        self.add(pieces, which)

    def add_last(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None) -> Tensor:
        """Add it, and return the levels."""
        self.add(pieces, which)
        return self.levels(which)

    def levels(self, which: Sequence[int] | None = None) -> Tensor:
        """Return the highest level of each parameter, and minus the lowest."""
        places, _ = self._places(which)
        held = self._levels[:, places]
        high, minus_low = held.max(0), np.where(held == EMPTY, EMPTY, -held).max(0)
        broken = self._broken[places]
        high[broken], minus_low[broken] = BROKEN, EMPTY
        levels = np.stack([high, minus_low], axis=1).astype(np.int32).reshape(-1)
        return torch.from_numpy(levels).to(self._device)

    def gather(self, agreed: Tensor, which: Sequence[int] | None = None, into: Tensor | None = None) -> Tensor:
        """Write the sums into one row of integers."""
        assert into is None, "ranks share only host memory"
        (places, sizes), (high, pairs) = self._places(which), spans_of(agreed.numpy())
        wire = torch.zeros(int((np.array(sizes, np.int64) * pairs).sum()), dtype=torch.int64, device=self._device)
        for row, held in enumerate(self._sums):
            below = high - self._levels[row, places]  # how many levels the row is below the highest
            counts = (below >= 0) & (below < 2 * pairs)
            if which is None and counts.all() and (pairs == 1).all():
                wire += held * self._by_value(np.where(below == 0, 2**WIDTH, 1), sizes)
            else:
                self._gather_each(row, wire, (places, sizes), pairs, np.where(counts, below, -1))
            torch._foreach_zero_(self._pieces(row, which))
        self._levels[:, places] = EMPTY
        self._broken[places] = False
        return wire

    def spread(
        self, agreed: Tensor, wires: Sequence[Tensor], pieces: Sequence[Tensor], which: Sequence[int] | None = None
    ) -> None:
        """Turn the sums into values."""
        (wire,) = wires
        (_, sizes), (high, pairs) = self._places(which), spans_of(agreed.numpy())
        flats = [piece.as_strided((piece.numel(),), (1,)) for piece in pieces]
        if (pairs == 1).all():  # nearly always
            scale = self._by_value(np.ldexp(1.0, WIDTH * (high - 1) - self._digits), sizes)
            torch._foreach_copy_(flats, list(wire.double().mul_(scale).split_with_sizes(sizes)))
            return
        rows = wire.split_with_sizes([size * count for size, count in zip(sizes, pairs.tolist(), strict=True)])
        for piece, row, top in zip(flats, rows, high.tolist(), strict=True):
            total = torch.full_like(piece, torch.nan if top == BROKEN else 0.0, dtype=torch.float64)
            pair = row.view(-1, piece.numel()) if piece.numel() else row.view(0, 0)
            for place in reversed(range(len(pair))):
                total += pair[place].double() * 2.0 ** (WIDTH * (top - 2 * place - 1) - self._digits)
            piece.copy_(total)

    def take(self, pieces: Sequence[Tensor]) -> None:
        """Write the sums of a rank that has all parts."""
        levels = self.levels().cpu()
        self.spread(levels, [self.gather(levels)], pieces)

    def _find_rows(self, places: Any, exponents: Any) -> tuple[Any, Any]:
        """Return the row of each part (-1 for none) and the factor of its values; assign a free row to a new level."""
        level = np.maximum(-(-exponents.astype(np.int64) // WIDTH), LEAST)
        held = self._levels[:, places]
        top = np.maximum(level, held.max(0))
        counts = (np.abs(exponents) != NOT_FINITE) & (level > top - LEVELS)
        same, free = held == level, held <= top - LEVELS  # empty, or too low to count
        rows = np.where(same.any(0), same.argmax(0), free.argmax(0))
        for k in np.flatnonzero(counts & ~same.any(0)).tolist():
            row, place = int(rows[k]), int(places[k])
            if self._levels[row, place] != EMPTY:
                self._pieces(row, [place])[0].zero_()
            self._levels[row, place] = level[k]
        return np.where(counts, rows, -1), np.ldexp(1.0, self._digits - WIDTH * level)

    def _gather_each(self, row: int, wire: Tensor, which: tuple[Any, list[int]], pairs: Any, below: Any) -> None:
        """Add what a row holds of each parameter to its place on the wire."""
        places, sizes = which
        start = 0
        for place, size, count, depth in zip(places.tolist(), sizes, pairs.tolist(), below.tolist(), strict=True):
            if depth >= 0:
                at = start + size * (depth // 2)
                piece = self._pieces(row, [place])[0]
                wire[at : at + size].add_(piece, alpha=1 if depth % 2 else 2**WIDTH)
            start += size * count

    def _places(self, which: Sequence[int] | None) -> tuple[Any, list[int]]:
        places = np.arange(len(self._sizes)) if which is None else np.asarray(which, np.int64)
        return places, [self._sizes[place] for place in places.tolist()]

    def _pieces(self, row: int, which: Sequence[int] | None) -> list[Tensor]:
        if which is None:
            return [self._sums[row]]
        pieces = self._sums[row].split_with_sizes(self._sizes)
        return [pieces[place] for place in which]

    def _by_value(self, of_parameters: Any, sizes: Sequence[int]) -> Tensor:
        """Return a number that each parameter has, repeated for each of its values, on the device."""
        parameters = torch.from_numpy(of_parameters).to(self._device, non_blocking=True)
        return parameters[_owners(tuple(sizes), self._device)]


def _find_exponents(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """`bigstep.exchange.codecs.powers.find_exponents` in a few launches.

    The bits of a float without its sign, read as an integer, grow with its magnitude, and NaN lies above infinity.
    """
    floats = flat.float() if flat.element_size() == 2 else flat
    integer = torch.int32 if floats.dtype == torch.float32 else torch.int64
    bits = floats.view(integer) & torch.iinfo(integer).max
    pieces = [piece for piece in bits.split_with_sizes(list(sizes)) if piece.numel()]
    tops = torch.stack(torch._foreach_max(pieces)).view(floats.dtype)
    found = torch.frexp(tops).exponent.masked_fill(tops == 0, -NOT_FINITE)
    found = found.masked_fill(~torch.isfinite(tops), NOT_FINITE)
    exponents = found.new_full((len(sizes),), -NOT_FINITE)
    exponents[torch.tensor([place for place, size in enumerate(sizes) if size], device=flat.device)] = found
    return exponents


@lru_cache(maxsize=64)
def _owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The index of the parameter that each value belongs to."""
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).int().to(device)
