"""Sums of integers that grow part by part, before the size of the largest part is known.

`Exact` writes all parts on one scale, so it has to see all of them first; here a part is added and can then be freed.
Each part of a parameter is written on a scale of its own, which depends on nothing but the part: with 2^e above its
|values|, l = ceil(e / 4), and h = log2 of the number of parts, rounded up::

    q = round(value * 2^k(l)),   k(l) = 58 - h - 4 l,   pile(l) = q + q + ...

Parts of one level l are added as integers. A pile stays below 2^58, so two neighbouring levels fit into one 64-bit
integer, 16 pile(l) + pile(l - 1), and such a pair is what travels; parts of a step seldom span more levels, and where
they do, more pairs travel. Ranks agree on the levels by a maximum of integers. Parts below 2^-60 of the largest are
left out, on every rank alike.

So the sum has the same bits in any order and on any number of ranks, overflow is impossible, and rounding changes a
value by at most 2^(h - 55) of the largest of its part. A rank holds one integer per value and level, and one part,
however many it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Piles", "exact_sum_parts", "make_piles"]


class Piles(Protocol):
    """The sums of the parts of some parameters.

    In all methods `pieces` are values of the parameters `which` (their indices; by default all): one tensor each,
    without gaps in memory, whose values are taken in memory order.
    """

    def add(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None) -> None:
        """Add a part of each parameter; it is not kept."""

    def hold(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None) -> None:
        """Add a part of each parameter that will not be changed: it may be kept until `gather`, to save a pass."""

    def add_last(self, pieces: Sequence[Tensor], which: Sequence[int] | None = None) -> Tensor:
        """Add the last part of each parameter and return the `levels`; the pieces must not change before `gather`."""

    def levels(self, which: Sequence[int] | None = None) -> Tensor:
        """For each parameter the highest level, and minus the lowest; ranks need the maximum of both over all ranks."""

    def gather(self, agreed: Tensor, which: Sequence[int] | None = None, into: Tensor | None = None) -> Tensor:
        """Return the sums as they travel and forget the parts; they are written `into` a tensor, if one is given.

        `agreed` is the maximum of all ranks' `levels`, on the host; `into` must be long enough.
        """

    def spread(
        self, agreed: Tensor, wires: Sequence[Tensor], pieces: Sequence[Tensor], which: Sequence[int] | None = None
    ) -> None:
        """Turn what `gather` returned on all ranks into values: each pair rounded to float64, low levels first.

        `wires` is its sum as one tensor, or several tensors that are added up here.
        """

    def take(self, pieces: Sequence[Tensor]) -> None:
        """Write the sums of a rank that has all parts, as `gather` and `spread` would; forget the parts.

        The pieces may be those of the last part, which the sums then overwrite.
        """


def make_piles(sizes: Sequence[int], parts: int, device: torch.device) -> Piles:
    """Return empty piles.

    Args:
        sizes: Number of values of each parameter.
        parts: How many parts a sum has, on all ranks together.
        device: Where the values are.
    """
    if device.type != "cpu":
        from bigstep.exchange.codecs.piles_device import DevicePiles

        return DevicePiles(sizes, parts)
    from bigstep.exchange.codecs.piles_host import HostPiles

    return HostPiles(sizes, parts)


def exact_sum_parts(parts: Sequence[Tensor], sizes: Sequence[int] | None = None, *, count: int = 0) -> Tensor:
    """Sum flat gradients of several workers with the arithmetic, and hence the bits, of an exact run.

    Args:
        parts: A flat tensor for each worker, of one type and length.
        sizes: Number of values of each parameter in them; by default they hold one parameter.
        count: How many parts the sum has in all, these included; by default it has no others.

    Returns:
        The sum, in the type of the parts. Neither their order matters nor how they are spread over ranks:

        >>> parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
        >>> exact_sum_parts(parts), exact_sum_parts(parts[::-1]), sum(parts)
        (tensor([1.]), tensor([1.]), tensor([0.]))
    """
    sizes = [parts[0].numel()] if sizes is None else list(sizes)
    piles = make_piles(sizes, count or len(parts), parts[0].device)
    for part in parts:
        piles.add(part.split_with_sizes(sizes))
    out = torch.empty_like(parts[0])
    piles.take(out.split_with_sizes(sizes))
    return out
