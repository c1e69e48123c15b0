"""Which islands a rank hosts, and where it saves them. Imports no torch, since the launcher uses it too."""

from __future__ import annotations

__all__ = ["APART", "fitting_ranks", "islands_of_rank"]

APART = "meetings/*/apart/step-*.ckpt"
"""Where ranks save their islands when another is lost, in the run folder."""


def islands_of_rank(islands: int, rank: int, ranks: int) -> range:
    """Return the islands of a rank: whole ones with at most one rank per island, else the one that it shares.

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
    """Return how many of these ranks islands can use: all up to one per island, beyond that equally many per island.

    >>> fitting_ranks(4, 3), fitting_ranks(2, 3), fitting_ranks(2, 5), fitting_ranks(1, 3)
    (3, 2, 4, 3)
    """
    return ranks if ranks <= islands else islands * (ranks // islands)
