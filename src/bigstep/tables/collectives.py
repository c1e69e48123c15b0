"""Collectives by name: what each does, and how many bytes and rounds it takes.

`bigstep.exchange` is held to these figures by its tests, and the planner builds on them. All figures are what one
rank sends; a round is a message that cannot start before the one ahead of it has arrived (the alpha term of a cost
model).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bigstep.errors import ConfigError
from bigstep.tables import find

__all__ = [
    "COLLECTIVES", "RING_ROUND_BYTES", "RUNNABLE", "CollectiveEntry", "Layout", "Traffic", "choose_by_size",
    "choose_grid", "collective_traffic",
]  # fmt: skip

RING_ROUND_BYTES = 65_536
"""Bytes that a round of a ring must move to be worth its latency: from there on `hybrid` takes the ring.

On the clusters that the planner ships the two costs cross at 32 to 128 KiB, whatever the number of devices.
"""


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one collective; `inner` and `outer` split it where there are two levels of links."""

    messages: int
    """Rounds that follow one another."""
    bytes_sent: float
    """Bytes this rank puts on the wire."""
    inner: Traffic | None = None
    """Inside the node (hierarchical) or along X (torus)."""
    outer: Traffic | None = None
    """Between leaders (hierarchical) or along Y (torus)."""


@dataclass(frozen=True)
class Layout:
    """How ranks lie, for the collectives that ask."""

    grid: tuple[int, int] | None = None
    """X and Y of a torus; None for the squarest."""
    group: int | None = None
    """Ranks in a node; None for all."""
    role: Literal["leader", "member"] = "leader"
    """The busiest rank (a leader, or the partner of an extra rank), or the least busy one."""


@dataclass(frozen=True)
class CollectiveEntry:
    """A way in which gradients of all ranks become one."""

    about: str
    """One sentence."""
    traffic: Callable[[float, int, Layout], Traffic]
    """Of one rank, from the encoded bytes, the number of ranks (at least 2) and their layout."""
    price: str
    """The planner's function that puts this traffic on the links of a cluster."""
    home: str = ""
    """Where its code is; empty for one that only a plan knows, since the backend would do it by itself."""
    sums: bool = True
    """Whether values are added on their way; otherwise codes travel whole, to an owner of each block."""
    joins: tuple[str, ...] = ()
    """The collectives among which it chooses; its cost is that of the chosen one."""


def collective_traffic(
    collective: str,
    nbytes: float,
    ranks: int,
    *,
    grid: tuple[int, int] | None = None,
    group: int | None = None,
    role: Literal["leader", "member"] = "leader",
) -> Traffic:
    """Rounds and bytes of one rank that exchanges `nbytes` of gradient with `ranks` - 1 others.

    With n bytes, N ranks, groups of k and m = N / k leaders, p the largest power of two up to N::

        ring          2(N-1) rounds             2n(N-1)/N bytes
        halving       2 log2 N                  2n(N-1)/N;  N > p: 2n(p-1)/p + n (a partner), n (an extra rank)
        torus X x Y   2(X-1) + 2(Y-1)           2n(X-1)/X inner + 2(n/X)(Y-1)/Y outer = 2n(N-1)/N
        hierarchical  4(k-1) + 2(m-1)           leader 3n(k-1)/k inner + 2n(m-1)/m outer; member n + n(k-1)/k
        hybrid        hierarchical's while n/N < 64 KiB, ring's from there on
        gather        2 rounds                  2n(N-1)/N
        switch        2 rounds                  n: once up the tree of switches

    Args:
        collective: A name of `COLLECTIVES`.
        nbytes: Encoded size of what is exchanged (`bigstep.tables.codecs.encoded_bytes`).
        ranks: How many ranks take part.
        grid: X and Y of a torus; by default the squarest.
        group: Ranks in a node (hierarchical); by default all.
        role: The busiest rank, or the least busy one.

    Returns:
        The traffic of that rank.

    Example:
        A torus moves exactly a ring's bytes in far fewer rounds.

        >>> ring = collective_traffic("ring", 51e6, 2048)
        >>> torus = collective_traffic("torus", 51e6, 2048, grid=(64, 32))
        >>> ring.messages, torus.messages, round(ring.bytes_sent) == round(torus.bytes_sent)
        (4094, 188, True)

    Reference:
        Goyal et al., Accurate, Large Minibatch SGD, 2017, section 4 (ring, halving/doubling); Mikami et al., Massively
        Distributed SGD, 2018, section 3 (torus); Jia et al., 2018 (hybrid); Seide et al., 1-Bit SGD, 2014 (gather).

    Differs from the paper:
        Sony counts only the horizontal rounds of a torus; the vertical ones are counted here too.
    """
    entry = find(COLLECTIVES, "collective", collective)
    if ranks <= 1:
        return Traffic(0, 0.0)
    return entry.traffic(float(nbytes), ranks, Layout(grid, group, role))


def choose_grid(ranks: int, ranks_per_node: int = 0) -> tuple[int, int]:
    """X and Y of a torus with the fewest rounds, 2(X - 1) + 2(Y - 1), whose rows are whole nodes.

    Of grids with equally many rounds the one with the shortest rows is taken: the fewer nodes a row spans, the fewer
    bytes cross the slow links. Without nodes it is the squarest grid; a prime number of ranks gives one row, a ring.

    >>> choose_grid(32, ranks_per_node=4), choose_grid(3456, ranks_per_node=4)
    ((4, 8), (64, 54))
    >>> choose_grid(2048), choose_grid(6), choose_grid(7)
    ((64, 32), (3, 2), (7, 1))
    """
    if 1 < ranks_per_node < ranks and ranks % ranks_per_node == 0:
        nodes = ranks // ranks_per_node
        grids = [(ranks_per_node * j, nodes // j) for j in range(1, nodes + 1) if nodes % j == 0]
        return min(grids, key=sum)
    Y = next(y for y in range(math.isqrt(ranks), 0, -1) if ranks % y == 0)
    return ranks // Y, Y


def choose_by_size(nbytes: float, ranks: int) -> str:
    """The collective that `hybrid` takes for a message.

    >>> choose_by_size(4e6, 2048), choose_by_size(75.5e6, 1024)  # a group of ResNet-50's; AlexNet's largest layer
    ('hierarchical', 'ring')
    """
    return "ring" if nbytes >= RING_ROUND_BYTES * ranks else "hierarchical"


def _ring(n: float, N: int, _: Layout | None = None) -> Traffic:
    """Reduce-scatter, then all-gather: N - 1 rounds of n / N bytes each."""
    return Traffic(2 * (N - 1), 2 * n * (N - 1) / N)


def _torus(n: float, N: int, layout: Layout) -> Traffic:
    X, Y = layout.grid or choose_grid(N)
    _require_places(X * Y == N, f"A torus of {X} x {Y} has {X * Y} places", N)
    return _two_levels(_ring(n, X), _ring(n / X, Y))


def _hierarchical(n: float, N: int, layout: Layout) -> Traffic:
    k = layout.group or N
    _require_places(N % k == 0, f"Nodes of {k} ranks do not fill up evenly", N)
    m = N // k
    part = n * (k - 1) / k
    if layout.role == "leader":
        return _two_levels(Traffic(4 * (k - 1), 3 * part), _ring(n, m))
    return _two_levels(Traffic(4 * (k - 1), n + part if k > 1 else 0.0), Traffic(2 * (m - 1), 0.0))


def _halving(n: float, N: int, layout: Layout) -> Traffic:
    p = 1 << (N.bit_length() - 1)
    rounds, sent = 2 * (p.bit_length() - 1), 2 * n * (p - 1) / p
    if p == N:
        return Traffic(rounds, sent)
    return Traffic(rounds + 2, sent + n if layout.role == "leader" else n)


def _hybrid(n: float, N: int, layout: Layout) -> Traffic:
    return _ring(n, N) if choose_by_size(n, N) == "ring" else _hierarchical(n, N, layout)


def _gather(n: float, N: int, _: Layout) -> Traffic:
    return Traffic(2, 2 * n * (N - 1) / N)


def _switch(n: float, N: int, _: Layout) -> Traffic:
    return Traffic(2, n)


def _two_levels(inner: Traffic, outer: Traffic) -> Traffic:
    return Traffic(inner.messages + outer.messages, inner.bytes_sent + outer.bytes_sent, inner, outer)


def _require_places(holds: bool, what: str, ranks: int) -> None:
    if not holds:
        raise ConfigError(f"{what}, but there are {ranks} ranks: change the grid or the ranks of a node.")


COLLECTIVES = {
    "ring": CollectiveEntry(
        "the backend's own all-reduce, a ring with Gloo",
        traffic=_ring,
        price="bigstep.plan.cost:price_ring",
        home="bigstep.exchange.collectives.ring:Ring",
    ),
    "hierarchical": CollectiveEntry(
        "reduce in the node, all-reduce among leaders, broadcast in the node",
        traffic=_hierarchical,
        price="bigstep.plan.cost:price_hierarchical",
        home="bigstep.exchange.collectives.hierarchical:Hierarchical",
    ),
    "torus": CollectiveEntry(
        "reduce-scatter along X, all-reduce of 1/X along Y, all-gather along X",
        traffic=_torus,
        price="bigstep.plan.cost:price_torus",
        home="bigstep.exchange.collectives.torus:Torus",
    ),
    "halving": CollectiveEntry(
        "recursive halving, then doubling; extra ranks folded in",
        traffic=_halving,
        price="bigstep.plan.cost:price_halving",
        home="bigstep.exchange.collectives.halving:Halving",
    ),
    "hybrid": CollectiveEntry(
        "hierarchical for small messages, ring for those of at least 64 KiB per rank",
        traffic=_hybrid,
        price="bigstep.plan.cost:price_hybrid",
        home="bigstep.exchange.collectives.hybrid:Hybrid",
        joins=("hierarchical", "ring"),
    ),
    "gather": CollectiveEntry(
        "an owner for each block gathers its codes from all; for codes that cannot be summed",
        traffic=_gather,
        price="bigstep.plan.cost:price_gather",
        home="bigstep.exchange.collectives.gather:Gather",
        sums=False,
    ),
    "switch": CollectiveEntry(
        "the network's switches compute the sum, if they can",
        traffic=_switch,
        price="bigstep.plan.cost:price_switch",
    ),
}
RUNNABLE = {name: entry for name, entry in COLLECTIVES.items() if entry.home}
"""Those that `bigstep.exchange` runs; a plan knows the others too."""
