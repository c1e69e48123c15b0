"""Epochs of a linear model over arranged rows: step sizes, decay and threads around the kernel."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigstep.errors import RunError
from bigstep.sparse.kernels.hogwild import AIG, CHUNK, CONTROL_SIZE, HINGE, LOGISTIC, TICKET, TURN, linear_worker
from bigstep.sparse.modes import MODES
from bigstep.sparse.report import Part, Tally
from bigstep.sparse.rows import Arranged
from bigstep.sparse.threads import Threads, epoch_order

__all__ = ["BIAS_SHARE", "LOSSES", "LinearProblem", "run_epochs"]

LOSSES = {"hinge": HINGE, "logistic": LOGISTIC}

_PLACES = np.arange(CHUNK, dtype=np.float32)
SMALLEST_SCALE = 1e-4  # far from float32's limits, yet reached too seldom for folding to cost anything
BIAS_SHARE = 0.01  # the intercept is in every example, so its step is smaller by this factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProblem:
    """What stays the same from epoch to epoch.

    Each example x with target y does `w <- (w - rate * dloss(w.x + b, y) x) / (1 + rate * alpha)`, the implicit step
    for the L2 term, and `b <- b - bias_share * rate * dloss`.
    """

    rows: Arranged
    labels: NDArray[np.int32]
    """Output for which each example is positive."""
    weights: NDArray[np.float32]
    """Flat, (features + 1) x outputs; row 0 is the intercept. Changed in place."""
    outputs: int
    """Number of linear functions."""
    loss: str
    """A key of `LOSSES`."""
    mode: str
    """A key of `bigstep.sparse.modes.MODES`."""
    alpha: float
    bias_share: float = BIAS_SHARE
    """Step of the intercept relative to the others; 0 leaves it alone."""
    seed: int = 0
    """Together with the epoch it determines the order of the examples."""

    def run(self, order: NDArray[np.uint32], rate: float, threads: Threads, meanwhile: Callable[[], Any]) -> list[Part]:
        """Take every example once, in this order; return what each thread counted.

        The epoch is cut into stretches, after each of which the scale of the decay is folded into the weights.
        The first thread runs `meanwhile`, and the others need not wait for it.
        """
        n, decay = len(order), math.log1p(rate * self.alpha)
        stretch = n if decay == 0 else max(1, int(min(n, -math.log(SMALLEST_SCALE) / decay)))
        outer = np.exp(-decay * CHUNK * np.arange(stretch // CHUNK + 1)).astype(np.float32)
        inner = np.exp(np.float32(-decay) * _PLACES)  # float32 throughout: exponents are small here
        discipline, rows = MODES[self.mode].discipline, self.rows
        locks = np.zeros(len(self.weights) // self.outputs if discipline == AIG else 1, np.int64)
        parts: list[Part] = []
        for begin in range(0, n, stretch):
            end = min(begin + stretch, n)
            control = np.zeros(CONTROL_SIZE, np.int64)
            control[TICKET] = control[TURN] = begin

            def work(thread: int, begin: int = begin, end: int = end, control: NDArray[np.int64] = control) -> Part:
                if thread == 0 and begin == 0:
                    meanwhile()
                part: Part = linear_worker(
                    *(discipline, LOSSES[self.loss], thread, threads.count, begin, end, order),
                    *(rows.starts, rows.split, rows.indices, rows.values, self.labels, self.weights),
                    *(self.outputs, rows.hot, rows.longest, rate, rate * self.bias_share),
                    *(outer, inner, control, locks),
                )
                return part

            parts += threads.run(work)
            self.weights[self.outputs :] *= np.float32(math.exp(-decay * (end - begin)))
        return parts


def run_epochs(
    problem: LinearProblem,
    rates: Sequence[float],
    threads: Threads,
    *,
    first_epoch: int = 0,
    progress: Callable[[int, float, Tally], None] = lambda epoch, rate, tally: None,
) -> Tally:
    """Run one epoch for each rate and change the weights in place.

    Args:
        problem: Examples, weights and settings.
        rates: Step size of each epoch.
        threads: The threads.
        first_epoch: Number of the first of these epochs.
        progress: Called after each epoch with its number, its rate and what was counted so far.

    Returns:
        What was counted and timed.
    """
    n, tally = len(problem.labels), Tally()
    began = time.perf_counter()
    order, following = epoch_order(n, problem.seed, first_epoch), np.empty(n, np.uint32)
    for epoch, rate in enumerate(rates, first_epoch):

        def draw_next(epoch: int = epoch, room: NDArray[np.uint32] = following) -> None:
            if epoch + 1 < first_epoch + len(rates):
                epoch_order(n, problem.seed, epoch + 1, room)

        parts = problem.run(order, rate, threads, draw_next)
        order, following = following, order
        tally.add(parts, n, time.perf_counter() - began)
        if not (math.isfinite(tally.losses[-1]) and np.isfinite(problem.weights).all()):
            raise RunError(
                f"The weights became infinite in epoch {epoch} with step size {rate:.3g}; give a smaller gamma0 or "
                "scale the features."
            )
        progress(epoch, rate, tally)
        began = time.perf_counter()
    return tally
