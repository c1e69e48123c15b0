"""Naming what goes wrong while a run goes on: a slow rank, input that does not keep up, a layer that overflows."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.engine.ranks import AgreedError, Ranks

__all__ = ["InputWatch", "StragglerWatch", "cores_of_rank", "first_affected", "gradients_are_finite", "nonfinite_error"]

_SLOWER = 1.4
"""A rank is a straggler from this ratio to the median of the others on."""
_IN_A_ROW = 2
"""How many flushes in a row it must be so."""
_WAITING = 0.2
"""Share of the time from which on a run is said to wait for its data."""
_LONG_ENOUGH_S = 10.0
"""How long it must be so; the beginning of an epoch, when the loaders start, is no matter."""


class StragglerWatch:
    """Names a rank whose own work takes much longer than that of the others, once each time it begins.

    >>> watch, data = StragglerWatch(), [0.1, 0.1, 0.1]
    >>> [watch.see([1.0, 1.0, 2.1], data), watch.see([1.0, 1.1, 2.2], data), watch.see([1.0, 1.0, 2.0], data)]
    [None, 'Rank 2 takes 2.0 times as long as the others (in computing); the whole run waits for it.', None]
    """

    def __init__(self) -> None:
        self._suspect, self._times = -1, 0

    def see(self, compute_s: Sequence[float], data_s: Sequence[float]) -> str | None:
        """Take each rank's time of computing and of waiting for data since the last call; tell when one is sure."""
        if len(compute_s) < 2:
            return None
        own_s = [compute + data for compute, data in zip(compute_s, data_s, strict=True)]
        slowest = max(range(len(own_s)), key=own_s.__getitem__)

        def typical(seconds: Sequence[float]) -> float:
            return statistics.median(value for rank, value in enumerate(seconds) if rank != slowest)

        ratio = own_s[slowest] / max(typical(own_s), 1e-9)
        if ratio < _SLOWER:
            self._suspect, self._times = -1, 0
            return None
        self._times = self._times + 1 if slowest == self._suspect else 1
        self._suspect = slowest
        if self._times != _IN_A_ROW:
            return None
        excess_in_data = data_s[slowest] - typical(data_s) > compute_s[slowest] - typical(compute_s)
        part = "waiting for its data" if excess_in_data else "computing"
        return f"Rank {slowest} takes {ratio:.1f} times as long as the others (in {part}); the whole run waits for it."


class InputWatch:
    """Says once if a run that loads files waits for them much of the time, and what to change.

    Args:
        loaders: Loader processes of each rank; None where the data is in memory and there is nothing to say.
        cores: Cores that a rank has for itself.

    >>> watch = InputWatch(loaders=2, cores=8)
    >>> [watch.see([0.2, 2.4], 5.0), watch.see([0.2, 2.0], 5.5), watch.see([0.2, 2.0], 5.0)][1]
    'Waiting for data 42 % of the time: 2 loaders are too few; set data.loaders=4 (a rank has 8 cores).'
    """

    def __init__(self, loaders: int | None, cores: int) -> None:
        self._loaders, self._cores = loaders, cores
        self._waited_s = self._elapsed_s = 0.0

    def see(self, data_s: Sequence[float], elapsed_s: float) -> str | None:
        """Take each rank's time of waiting for data and the time that went by since the last call."""
        if self._loaders is None:
            return None
        self._waited_s += max(data_s)  # the others wait for that rank
        self._elapsed_s += elapsed_s
        if self._elapsed_s < _LONG_ENOUGH_S:
            return None
        share = min(0.99, self._waited_s / self._elapsed_s)
        if share <= _WAITING:
            self._waited_s = self._elapsed_s = 0.0
            return None
        sentence = f"Waiting for data {100 * share:.0f} % of the time: {self._advice(self._loaders, share)}"
        self._loaders = None  # once is enough
        return sentence

    def _advice(self, loaders: int, share: float) -> str:
        if loaders >= self._cores:
            return (
                f"all {self._cores} cores of a rank load already; store smaller images, use a machine with more cores, "
                "or give each GPU more to do."
            )
        # without loaders the loop itself loads, for `share` of its time; loaders work beside it, and always
        wanted = min(self._cores, math.ceil((loaders or share) / (1 - share)))
        few = "1 loader is" if loaders == 1 else f"{loaders or 'no'} loaders are"
        return f"{few} too few; set data.loaders={max(wanted, loaders + 1)} (a rank has {self._cores} cores)."


def cores_of_rank() -> int:
    """Return how many cores this rank has for itself, if the ranks of this machine share them evenly."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def gradients_are_finite(model: nn.Module) -> bool:
    """Whether every gradient is finite; the same on all ranks, since they hold the same gradient."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return not gradients or bool(torch.stack(torch._foreach_norm(gradients)).isfinite().all())


@torch.no_grad()
def first_affected(model: nn.Module, inputs: Any) -> str | None:
    """Name the first parameter that is not finite, or the first layer whose output is not, if there is one."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"the weights of {name}"
    if inputs is None:  # a rank without samples in this step
        return None
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not output.isfinite().all():
                found.append(f"the output of {name or type(module).__name__}")

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def nonfinite_error(
    model: nn.Module, inputs: Any, ranks: Ranks, step: int, optimizer: torch.optim.Optimizer
) -> AgreedError:
    """Say at which step, rate and layer a run broke; every rank must call this, with the inputs of its last forward."""
    mine = first_affected(model, inputs)
    found = [(rank, layer) for rank, layer in enumerate(ranks.gather(mine)) if layer]
    where = f"first in {found[0][1]} on rank {found[0][0]}" if found else "in a backward, after finite forwards"
    rate = float(optimizer.param_groups[0]["lr"])
    return AgreedError(
        f"The gradient is not finite at step {step} (learning rate {rate:.4g}), {where}; lower lr.base, lengthen the "
        "warm-up or shrink the batch, or set nonfinite=skip to drop such steps."
    )
