"""Epochs of a linear model over arranged rows: step sizes, decay and threads around the kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigstep.errors import RunError
from bigstep.sparse.crew import Crew, epoch_order
from bigstep.sparse.kernels.hogwild import (
    CHUNK,
    CONTROL_SIZE,
    FREE,
    HINGE,
    LOCKED,
    LOGISTIC,
    ROUND_ROBIN,
    TICKET,
    TURN,
    linear_worker,
)
from bigstep.sparse.report import Tally
from bigstep.sparse.rows import Arranged

__all__ = ["LOSSES", "MODES", "run_epochs"]

LOSSES = {"hinge": HINGE, "logistic": LOGISTIC}
MODES = {"hogwild": FREE, "locked": LOCKED, "round_robin": ROUND_ROBIN, "serial": FREE}

_PLACES = np.arange(CHUNK, dtype=np.float32)
SMALLEST_SCALE = 1e-4  # far from float32's limits, and few enough folds that they cost nothing
BIAS_SHARE = 0.01  # the intercept is in every example; on sparse data its step is this much smaller


def run_epochs(
    rows: Arranged,
    labels: NDArray[np.int32],
    weights: NDArray[np.float32],
    *,
    outputs: int,
    loss: str,
    mode: str,
    crew: Crew,
    alpha: float,
    rates: list[float],
    bias_share: float,
    seed: int,
    first_epoch: int,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> Tally:
    """Run one epoch for each rate and change the weights in place.

    Each example x with target y does `w <- (w - rate * dloss(w.x + b, y) x) / (1 + rate * alpha)`, the implicit step
    for the L2 term, and `b <- b - bias_share * rate * dloss`.

    Args:
        rows: Arranged examples.
        labels: Output for which each example is positive.
        weights: Flat, (features + 1) x outputs; row 0 is the intercept.
        outputs: Number of linear functions.
        loss: A key of `LOSSES`.
        mode: A key of `MODES`.
        crew: The threads.
        alpha: L2 coefficient.
        rates: Step size of each epoch.
        bias_share: Step of the intercept relative to the others; 0 leaves it alone.
        seed: Chooses the order of the examples together with the epoch.
        first_epoch: Number of the first of these epochs.
        progress: Called after each epoch.

    Returns:
        What was counted and timed.
    """
    n, last = len(labels), first_epoch + len(rates) - 1
    tally = Tally()
    began = time.perf_counter()
    order, following = epoch_order(n, seed, first_epoch), np.empty(n, np.uint32)
    for epoch, rate in enumerate(rates, first_epoch):
        decay = math.log1p(rate * alpha)
        stretch = n if decay == 0 else max(1, min(n, int(-math.log(SMALLEST_SCALE) / decay)))
        outer = np.exp(-decay * CHUNK * np.arange(stretch // CHUNK + 1)).astype(np.float32)
        inner = np.exp(np.float32(-decay) * _PLACES)  # float32 throughout: exponents are small here
        parts: list[tuple[float, int, int, int]] = []
        for begin in range(0, n, stretch):
            end = min(begin + stretch, n)
            control = np.zeros(CONTROL_SIZE, np.int64)
            control[TICKET] = control[TURN] = begin

            def work(
                thread: int,
                begin: int = begin,
                end: int = end,
                control: NDArray[np.int64] = control,
                rate: float = rate,
                order: NDArray[np.uint32] = order,
                upcoming: NDArray[np.uint32] | None = None if begin or epoch == last else following,
                epoch: int = epoch,
                outer: NDArray[np.float32] = outer,
                inner: NDArray[np.float32] = inner,
            ) -> tuple[float, int, int, int]:
                if thread == 0 and upcoming is not None:  # the other threads need not wait for it
                    epoch_order(n, seed, epoch + 1, upcoming)
                result: tuple[float, int, int, int] = linear_worker(
                    MODES[mode],
                    LOSSES[loss],
                    thread,
                    crew.n_threads,
                    begin,
                    end,
                    order,
                    rows.starts,
                    rows.split,
                    rows.indices,
                    rows.values,
                    labels,
                    weights,
                    outputs,
                    rows.hot,
                    rows.longest,
                    rate,
                    rate * bias_share,
                    outer,
                    inner,
                    control,
                )
                return result

            parts += crew.run(work)
            weights[outputs:] *= np.float32(math.exp(-decay * (end - begin)))
        order, following = following, order
        tally.add(parts, n, time.perf_counter() - began)
        if not (math.isfinite(tally.losses[-1]) and np.isfinite(weights).all()):
            raise RunError(
                f"The weights became infinite in epoch {epoch} with step size {rate:.3g}; give a smaller gamma0 or "
                "scale the features."
            )
        if progress is not None:
            progress(
                {
                    "epoch": epoch + 1,
                    "epochs": first_epoch + len(rates),
                    "loss": tally.losses[-1],
                    "rate": rate,
                    "examples_per_s": tally.examples_per_s,
                    "seconds": tally.seconds,
                }
            )
        began = time.perf_counter()
    return tally
