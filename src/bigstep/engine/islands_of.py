"""Which islands a rank hosts, and where it keeps them; without torch, since whoever watches ranks asks it too."""

from __future__ import annotations

__all__ = ["APART", "fitting_ranks", "islands_of_rank"]

APART = "meetings/*/apart/step-*.ckpt"
"""Where ranks keep their islands when another is lost, in the run folder."""


def islands_of_rank(islands: int, rank: int, ranks: int) -> range:
    """Return the islands of a rank: whole ones up to a rank an island, beyond that the one that it shares.

    >>> [list(islands_of_rank(4, rank, 2)) for rank in range(2)]
    [[0, 1], [2, 3]]
    >>> [list(islands_of_rank(2, rank, 4)) for rank in range(4)]
    [[0], [0], [1], [1]]
    """
    if ranks <= islands:
        return range(islands * rank // ranks, islands * (rank + 1) // ranks)
    island = rank // (ranks // islands)
    return range(island, island + 1)


def fitting_ranks(islands: int, ranks: int) -> int:
    """Return the most ranks of these that islands can be spread over evenly.

    >>> fitting_ranks(4, 3), fitting_ranks(2, 3), fitting_ranks(2, 5), fitting_ranks(1, 3)
    (3, 2, 4, 3)
    """
    return ranks if ranks <= islands else islands * (ranks // islands)
