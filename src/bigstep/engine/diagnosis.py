"""Naming the layer in which a run overflows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.engine.ranks import AgreedError, Ranks

__all__ = ["first_affected", "gradients_are_finite", "nonfinite_error"]


def gradients_are_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether every gradient is finite; the same on all ranks, since they hold the same gradient."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
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
