"""Bytes and rounds of every collective and codec: arithmetic only.

`bigstep.exchange` is held to these figures by its tests, and the planner builds on them. Everything counts what one
rank sends; a round is a message that cannot start before the one ahead of it has arrived (the alpha term of a cost
model).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bigstep.errors import ConfigError, nearest

__all__ = [
    "BYTES_PER_VALUE", "COLLECTIVES", "ONEBIT_MAX_BLOCK", "ONEBIT_MIN_BLOCK", "SUMMABLE_CODECS", "Traffic",
    "choose_grid", "collective_traffic", "encoded_bytes", "onebit_blocks",
]  # fmt: skip

COLLECTIVES = ("ring", "hierarchical", "torus", "halving", "gather")

BYTES_PER_VALUE = {"none": 4, "fp16": 2, "bf16": 2}
SUMMABLE_CODECS = tuple(BYTES_PER_VALUE)

# A block shares two reconstruction values (8 bytes). From 448 values up a block takes at most 1/28 of float32, and
# 4096 values with their residuals still lie in a core's first- and second-level cache for the second pass over them.
ONEBIT_MIN_BLOCK = 512
ONEBIT_MAX_BLOCK = 4096

# torch's PowerSGD sends a matrix whole unless its factors are at least this many times smaller
_POWERSGD_MIN_RATE = 2


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
        gather        2 rounds                  2n(N-1)/N

    Args:
        collective: ring, hierarchical, torus, halving or gather (an owner for each slice).
        nbytes: Encoded size of what is exchanged (`encoded_bytes`).
        ranks: How many ranks take part.
        grid: X and Y of a torus; by default the squarest.
        group: Ranks in a node (hierarchical); by default all.
        role: The busiest rank (a leader, or the partner of an extra rank), or the least busy one (a member, or an
            extra rank of halving).

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
        Distributed SGD, 2018, section 3 (torus); Seide et al., 1-Bit SGD, 2014 (gather).

    Differs from the paper:
        Sony counts only the horizontal rounds of a torus; the vertical ones are counted here too.
    """
    if collective not in COLLECTIVES:
        raise ConfigError(f"There is no collective {collective!r}: {nearest(collective, COLLECTIVES)}.")
    n, N = float(nbytes), ranks
    if N <= 1:
        return Traffic(0, 0.0)
    if collective == "ring":
        return _all_reduce(n, N)
    if collective == "gather":
        return Traffic(2, 2 * n * (N - 1) / N)
    if collective == "halving":
        p = 1 << (N.bit_length() - 1)
        rounds, sent = 2 * (p.bit_length() - 1), 2 * n * (p - 1) / p
        if p == N:
            return Traffic(rounds, sent)
        return Traffic(rounds + 2, sent + n if role == "leader" else n)
    if collective == "torus":
        X, Y = grid or choose_grid(N)
        _check_product(X * Y == N, f"A torus of {X} x {Y} has {X * Y} places", N)
        inner, outer = _all_reduce(n, X), _all_reduce(n / X, Y)
    else:
        k = group or N
        _check_product(N % k == 0, f"Nodes of {k} ranks do not fill up evenly", N)
        m = N // k
        part = n * (k - 1) / k
        if role == "leader":
            inner, outer = Traffic(4 * (k - 1), 3 * part), _all_reduce(n, m)
        else:
            inner, outer = Traffic(4 * (k - 1), n + part if k > 1 else 0.0), Traffic(2 * (m - 1), 0.0)
    return Traffic(inner.messages + outer.messages, inner.bytes_sent + outer.bytes_sent, inner, outer)


def choose_grid(ranks: int, ranks_per_node: int = 0) -> tuple[int, int]:
    """X and Y of a torus: X fills a node, so that only Y crosses the slow links; without nodes, the squarest grid.

    A prime number of ranks gives a torus of one row, which is a ring.

    >>> choose_grid(32, ranks_per_node=4), choose_grid(2048), choose_grid(6), choose_grid(7)
    ((4, 8), (64, 32), (3, 2), (7, 1))
    """
    if 1 < ranks_per_node < ranks and ranks % ranks_per_node == 0:
        return ranks_per_node, ranks // ranks_per_node
    Y = next(y for y in range(math.isqrt(ranks), 0, -1) if ranks % y == 0)
    return ranks // Y, Y


def encoded_bytes(codec: str, shapes: Iterable[Sequence[int]], *, rank: int = 2) -> int:
    """Bytes of the gradients of parameters with these shapes, as `codec` writes them.

    Args:
        codec: none, fp16, bf16, onebit or powersgd.
        shapes: The shape of each parameter.
        rank: Of the approximation (powersgd).

    Returns:
        The sum over all parameters. 1-bit: one bit a value, each block filled up to whole bytes, plus two float32
        for each block. powersgd: both factors of a matrix, or the tensor itself where those save less than half.

    >>> encoded_bytes("none", [(1000, 2048)]), encoded_bytes("onebit", [(1000, 2048)])
    (8192000, 264000)
    """
    if codec in BYTES_PER_VALUE:
        return BYTES_PER_VALUE[codec] * sum(math.prod(shape) for shape in shapes)
    if codec == "onebit":
        return sum(_onebit_bytes(shape) for shape in shapes)
    if codec == "powersgd":
        return sum(_powersgd_bytes(shape, rank) for shape in shapes)
    codecs = [*BYTES_PER_VALUE, "onebit", "powersgd"]
    raise ConfigError(f"There is no codec {codec!r}: {nearest(codec, codecs)}.")


def onebit_blocks(shape: Sequence[int]) -> list[int]:
    """Lengths of the blocks that share two reconstruction values, in the order of the flat parameter.

    A block is a column of the paper: the weights that lead into one output. Rows shorter than 512 values share a block
    with their neighbours, rows longer than 4096 are cut evenly, and a bias or norm parameter counts as rows of one.

    >>> onebit_blocks((3, 1000)), onebit_blocks((2, 5000)), onebit_blocks((10, 100)), onebit_blocks((64,))
    ([1000, 1000, 1000], [2500, 2500, 2500, 2500], [600, 400], [64])
    """
    pattern, repeats, tail = _onebit_pattern(shape)
    return pattern * repeats + ([tail] if tail else [])


def _onebit_pattern(shape: Sequence[int]) -> tuple[list[int], int, int]:
    """The blocks of a parameter as a pattern, how often it is repeated, and a shorter last block (0 for none)."""
    values = math.prod(shape)
    if values == 0:
        return [], 0, 0
    row = values // shape[0] if len(shape) > 1 else 1
    if row < ONEBIT_MIN_BLOCK:
        block = row * -(-ONEBIT_MIN_BLOCK // row)
        return [block], values // block, values % block
    parts = -(-row // ONEBIT_MAX_BLOCK)
    length = -(-row // parts)
    return [length] * (parts - 1) + [row - length * (parts - 1)], values // row, 0


def _onebit_bytes(shape: Sequence[int]) -> int:
    pattern, repeats, tail = _onebit_pattern(shape)
    return repeats * sum(-(-length // 8) + 8 for length in pattern) + (-(-tail // 8) + 8 if tail else 0)


def _powersgd_bytes(shape: Sequence[int], rank: int) -> int:
    values = math.prod(shape)
    if len(shape) < 2 or values == 0:
        return 4 * values
    n, m = shape[0], values // shape[0]
    r = min(n, m, rank)
    factors = (n + m) * r
    return 4 * (factors if factors * _POWERSGD_MIN_RATE < values else values)


def _all_reduce(n: float, N: int) -> Traffic:
    """A ring: reduce-scatter, then all-gather, N - 1 rounds of n / N bytes each."""
    return Traffic(2 * (N - 1), 2 * n * (N - 1) / N)


def _check_product(holds: bool, what: str, ranks: int) -> None:
    if not holds:
        raise ConfigError(f"{what}, but there are {ranks} ranks: change the grid or the ranks of a node.")
