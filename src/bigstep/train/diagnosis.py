"""Naming what goes wrong while a run goes on: a slow rank, a layer that overflows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.errors import RunError
from bigstep.train.ranks import Ranks

__all__ = ["StragglerWatch", "first_affected", "gradients_are_finite", "nonfinite_error"]

_SLOWER = 1.4
"""A rank is a straggler from this ratio to the median of the others on."""
_IN_A_ROW = 2
"""How many flushes in a row it must be so."""


class StragglerWatch:
    """Names a rank whose computing takes much longer than that of the others, once each time it begins.

    >>> watch = StragglerWatch()
    >>> [watch.see([1.0, 1.0, 2.1]), watch.see([1.0, 1.1, 2.2]), watch.see([1.0, 1.0, 2.0])]
    [None, 'Rank 2 computes 2.1 times as long as the others; the whole run waits for it.', None]
    """

    def __init__(self) -> None:
        self._suspect, self._times = -1, 0

    def see(self, seconds_by_rank: Sequence[float]) -> str | None:
        """Take each rank's computing time since the last call; return a sentence when a straggler is sure."""
        if len(seconds_by_rank) < 2:
            return None
        slowest = max(range(len(seconds_by_rank)), key=seconds_by_rank.__getitem__)
        others = [seconds for rank, seconds in enumerate(seconds_by_rank) if rank != slowest]
        ratio = seconds_by_rank[slowest] / max(statistics.median(others), 1e-9)
        if ratio < _SLOWER:
            self._suspect, self._times = -1, 0
            return None
        self._times = self._times + 1 if slowest == self._suspect else 1
        self._suspect = slowest
        if self._times != _IN_A_ROW:
            return None
        return f"Rank {slowest} computes {ratio:.1f} times as long as the others; the whole run waits for it."


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
) -> RunError:
    """Say at which step, rate and layer a run broke; every rank must call this, with the inputs of its last forward."""
    mine = first_affected(model, inputs)
    found = [(rank, layer) for rank, layer in enumerate(ranks.gather(mine)) if layer]
    where = f"first in {found[0][1]} on rank {found[0][0]}" if found else "in a backward, after finite forwards"
    rate = float(optimizer.param_groups[0]["lr"])
    return RunError(
        f"The gradient is not finite at step {step} (learning rate {rate:.4g}), {where}; lower lr.base, lengthen the "
        "warm-up or shrink the batch, or set nonfinite=skip to drop such steps."
    )
