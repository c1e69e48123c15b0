"""Sums of integers that grow part by part, before anybody knows how large the largest part will be.

`Exact` writes all parts on one scale, so it has to see all of them first; here a part is added and let go of. Each part
of a parameter is written on a scale of its own, which depends on nothing but the part: with 2^e above its |values|,
l = ceil(e / 4), and h = log2 of the number of parts, rounded up::

    q = round(value * 2^k(l)),   k(l) = 58 - h - 4 l,   pile(l) = q + q + ...

Parts of one level l are added as integers. A pile stays below 2^58, so two neighbouring levels fit into one 64-bit
integer, 16 pile(l) + pile(l - 1), and a pair is what travels; parts of a step seldom span more, and where they do, more
pairs do. Which levels there are is agreed upon by a maximum of integers. Parts below 2^-60 of the largest are left out,
on every rank alike.

So the sum has the same bits in any order and on any number of ranks, overflow is impossible, and a value is rounded to
2^(h - 55) of its part's largest at most. A rank holds an integer a value and level, however many parts it adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigstep.exchange.codecs.powers import NOT_FINITE, find_exponents, spare_bits

__all__ = ["Pile", "add_parts", "exact_sum_parts", "find_levels", "pairs_of", "take"]

_BITS, _WIDTH = 58, 4
_LEVELS = 16  # that are kept, from the highest: 64 binary digits
_LEAST = -240  # the lowest whose scale float64 still has
_BROKEN, _EMPTY = 10_000, -10_000  # levels of what is not finite, and of zeros


class Pile:
    """The sum of one parameter's parts.

    Args:
        size: Values of the parameter.
        parts: How many parts the sum has in all, on all ranks.
    """

    def __init__(self, size: int, parts: int) -> None:
        self._size, self._digits = size, _BITS - spare_bits(parts)
        self._sums: dict[int, Tensor] = {}  # by level
        self._broken = False

    def add(self, piece: Tensor, exponent: int) -> None:
        """Add a flat part, all of whose |values| are below 2^exponent."""
        if exponent == NOT_FINITE:
            self._broken = True
        if exponent in (NOT_FINITE, -NOT_FINITE):
            return  # broken, or zeros
        level = max(-(-exponent // _WIDTH), _LEAST)
        if level <= max(self._sums, default=level) - _LEVELS:
            return
        factor = 2.0 ** (self._digits - _WIDTH * level)
        if level in self._sums:
            _accumulate(self._sums[level], piece, factor)
        else:
            self._sums[level] = torch.empty(self._size, dtype=torch.int64, device=piece.device)
            _write(self._sums[level], piece, factor)

    @property
    def levels(self) -> tuple[int, int]:
        """The highest level, and minus the lowest: what all ranks need the maximum of."""
        if self._broken:
            return _BROKEN, _EMPTY
        return max(self._sums, default=_EMPTY), -min(self._sums, default=-_EMPTY)

    def gather(self, high: int, low: int, wire: Tensor) -> None:
        """Write the sum into `pairs_of(high, low)` rows of a wire, those of high levels first; forget the parts."""
        for row, upper in enumerate(range(high, high - 2 * pairs_of(high, low), -2)):
            piece = wire[row * self._size : (row + 1) * self._size]
            above, below = self._sums.get(upper), self._sums.get(upper - 1)
            if above is not None:
                torch.mul(above, 2**_WIDTH, out=piece)
                if below is not None:
                    piece.add_(below)
            elif below is not None:
                piece.copy_(below)
            else:
                piece.zero_()
        for each in self._sums.values():
            if each.is_cuda:  # made on the stream of backward, read on that of the exchange
                each.record_stream(torch.cuda.current_stream(each.device))
        self._sums, self._broken = {}, False

    def spread(self, high: int, low: int, wire: Tensor, out: Tensor) -> None:
        """Turn what all ranks' `gather` gave in sum into values: each pair rounded to float64, low levels first."""
        rows = pairs_of(high, low)
        if rows == 0:
            out.fill_(torch.nan if high == _BROKEN else 0.0)
            return
        total: Tensor | None = None
        for row in reversed(range(rows)):
            piece = wire[row * self._size : (row + 1) * self._size].double()
            piece *= 2.0 ** (_WIDTH * (high - 2 * row - 1) - self._digits)
            total = piece if total is None else total.add_(piece)
        assert total is not None
        out.copy_(total)


def pairs_of(high: int, low: int) -> int:
    """How many pairs of levels a parameter takes on the wire; none where there are only zeros, or no finite sum."""
    if high in (_BROKEN, _EMPTY):
        return 0
    return (high - max(low, high - _LEVELS + 1)) // 2 + 1


def find_levels(piles: Sequence[Pile], device: torch.device) -> Tensor:
    """Return the `levels` of some piles, for a maximum over ranks."""
    return torch.tensor([pile.levels for pile in piles], dtype=torch.int32, device=device).view(-1)


def add_parts(piles: Sequence[Pile], pieces: Sequence[Tensor]) -> None:
    """Add a part to each pile; pieces are flat, and are not kept."""
    if not pieces:
        return
    if pieces[0].is_cuda or pieces[0].dtype not in (torch.float32, torch.float64):
        exponents = find_exponents(list(pieces)).tolist()  # one look at the device for all of them
    else:
        from bigstep.exchange.codecs.piles_numba import find_exponent

        exponents = [find_exponent(piece.numpy()) for piece in pieces]
    for pile, piece, exponent in zip(piles, pieces, exponents, strict=True):
        pile.add(piece, exponent)


def exact_sum_parts(parts: Sequence[Tensor], sizes: Sequence[int] | None = None, *, count: int = 0) -> Tensor:
    """Sum flat gradients of several workers with the arithmetic, and hence the bits, of an exact run.

    Args:
        parts: A flat tensor for each worker, of one type and length.
        sizes: Values of each parameter in them; by default they are one.
        count: How many parts the sum has in all, these included; by default it has no others.

    Returns:
        The sum, in the type of the parts. Its order does not matter, nor how it is spread over ranks:

        >>> parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
        >>> exact_sum_parts(parts), exact_sum_parts(parts[::-1]), sum(parts)
        (tensor([1.]), tensor([1.]), tensor([0.]))
    """
    sizes = [parts[0].numel()] if sizes is None else list(sizes)
    piles = [Pile(size, count or len(parts)) for size in sizes]
    for part in parts:
        add_parts(piles, part.split_with_sizes(sizes))
    out = torch.empty_like(parts[0])
    for pile, piece in zip(piles, out.split_with_sizes(sizes), strict=True):
        take(pile, piece)
    return out


def take(pile: Pile, out: Tensor) -> None:
    """Write the sum of a rank that has all parts into a flat tensor, and forget the parts."""
    high, minus_low = pile.levels
    wire = torch.empty(pairs_of(high, -minus_low) * out.numel(), dtype=torch.int64, device=out.device)
    pile.gather(high, -minus_low, wire)
    pile.spread(high, -minus_low, wire, out)


def _write(total: Tensor, piece: Tensor, factor: float) -> None:
    if _by_numba(piece):
        from bigstep.exchange.codecs.piles_numba import write

        write(total.numpy(), piece.numpy(), factor)
    else:
        total.copy_(piece.double().mul_(factor).round_())


def _accumulate(total: Tensor, piece: Tensor, factor: float) -> None:
    if _by_numba(piece):
        from bigstep.exchange.codecs.piles_numba import accumulate

        accumulate(total.numpy(), piece.numpy(), factor)
    else:
        total += piece.double().mul_(factor).round_().long()


def _by_numba(piece: Tensor) -> bool:
    return not piece.is_cuda and piece.dtype in (torch.float32, torch.float64)
