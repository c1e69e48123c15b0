"""GPU kernels, under the name that version 0.1 gave them; the code lives in `bigstep.gpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bigstep import gpu

if TYPE_CHECKING:
    from bigstep.gpu import GraphedStep, batch_norm_relu, lars_step, optimize, set_groups

__all__ = ["GraphedStep", "batch_norm_relu", "lars_step", "optimize", "set_groups"]


def __getattr__(name: str) -> Any:
    return getattr(gpu, name)
