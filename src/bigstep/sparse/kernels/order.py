"""The order in which an epoch takes its examples, drawn without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigstep.sparse.kernels.atomics import compiled, inlined

__all__ = ["draw_order"]


@inlined
def _mix(word: Any) -> Any:
    """The finalizer of splitmix64: a bijection in which each bit of the input changes half of the output."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@compiled
def draw_order(order: Any, seed: Any, epoch: Any) -> None:
    """Fill `order` with a random permutation (Fisher and Yates, inside out), drawn by splitmix64."""
    state = _mix(_mix(np.uint64(seed)) + np.uint64(epoch))
    for i in range(np.uint64(len(order))):
        state += np.uint64(0x9E3779B97F4A7C15)
        # one of 0..i, by the high half of a product: uniform to one part in 2^32 / i
        j = ((_mix(state) >> np.uint64(32)) * (i + np.uint64(1))) >> np.uint64(32)
        order[i] = order[j]
        order[j] = i
