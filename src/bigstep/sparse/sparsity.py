"""How sparse a problem is in the sense of Hogwild!: Omega, Delta, rho, and what the paper predicts from them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from bigstep.sparse.kernels.sparse_rows import add_shares, count_meetings, mark_rows
from bigstep.sparse.rows import Rows

__all__ = ["Sparsity", "measure_sparsity"]

CANDIDATES = 32  # examples whose meetings are counted at once, a bit for each
SAMPLE = 2_000  # examples they are compared with: rho is then known to about +-2.2 points (two standard errors)


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """The figures of section 2 of the paper, for hyperedges e (examples) over coordinates v (features)."""

    omega: int
    """Omega: the largest number of coordinates in one example."""
    delta: float
    """Delta: the largest share of the examples that contain one coordinate."""
    rho: float
    """rho: largest share of the examples that share a coordinate with one; as found by `measure_sparsity`."""
    density: float
    """Mean share of the coordinates that an example contains."""

    def slowdown(self, lag: int) -> float:
        """Return the factor by which the theorem shrinks the step: 1 + 6 rho tau + 4 tau^2 Omega Delta^(1/2)."""
        return 1 + 6 * self.rho * lag + 4 * lag**2 * self.omega * math.sqrt(self.delta)

    def prediction(self, n_threads: int) -> str:
        """Say in a sentence whether the paper predicts that Hogwild! works here."""
        facts = f"Omega={self.omega}, Delta={self.delta:.2g}, rho={self.rho:.2g}"
        factor = self.slowdown(n_threads)
        if n_threads == 1:
            return f"One thread cannot collide ({facts})."
        if factor <= 2:
            return (
                f"Hogwild! should work here: with {facts} the theorem asks {n_threads} threads for steps only "
                f"{factor:.2f} times smaller, so near-linear speed-up is promised."
            )
        if self.density <= 0.01:
            return (
                f"Hogwild! should work here, though the theorem does not promise it ({facts}: steps {factor:.3g} times "
                "smaller): an example touches under 1 % of the coordinates, as in the paper's RCV1 (Delta=1, "
                "rho=0.44), which ran about three times faster on ten cores."
            )
        return (
            f"Hogwild! is not predicted to work here: with {facts} an example touches {self.density:.0%} of the "
            "coordinates, so that threads overwrite each other; prefer mode='serial', or compare the scores."
        )


def measure_sparsity(rows: Rows, counts: NDArray[np.int64]) -> Sparsity:
    """Measure Omega and Delta exactly and rho by sampling (the exact value takes time quadratic in the examples).

    Of a sample of 2,000 examples spread evenly over all of them (all, when there are fewer) the 32 with the largest sum
    of coordinate shares are compared with the whole sample; the largest share that one of them meets is `rho`. Apart
    from the error of sampling it can only be too low: another example may meet more than these 32.
    """
    lengths = np.diff(rows.indptr)
    shares = counts / rows.n_rows
    few = rows.n_rows <= SAMPLE
    sample = np.arange(rows.n_rows) if few else np.linspace(0, rows.n_rows - 1, SAMPLE).astype(np.int64)
    sums = np.zeros(len(sample))
    add_shares(rows.indptr, rows.indices, sample, shares, sums)
    chosen = sample[np.argpartition(-sums, min(CANDIDATES, len(sums)) - 1)[:CANDIDATES]]
    masks = np.zeros(rows.n_features, np.uint64)
    mark_rows(rows.indptr, rows.indices, chosen, masks)
    meetings = np.zeros(len(chosen), np.int64)
    count_meetings(rows.indptr, rows.indices, sample, masks, meetings)
    return Sparsity(
        omega=int(lengths.max()),
        delta=float(shares.max()),
        rho=float(meetings.max() / len(sample)),
        density=float(lengths.mean() / rows.n_features),
    )
