"""GPU kernels behind plain functions; each has a twin in plain torch that is its specification.

Importing this package imports neither triton nor numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigstep.gpu.batch_norm import batch_norm_relu
    from bigstep.gpu.graphs import GraphedStep
    from bigstep.gpu.lars import lars_step
    from bigstep.gpu.loss_scale import LossScale
    from bigstep.gpu.transform import optimize, set_groups

__all__ = ["GraphedStep", "LossScale", "batch_norm_relu", "lars_step", "optimize", "set_groups"]

_HOME = {
    "GraphedStep": "bigstep.gpu.graphs",
    "LossScale": "bigstep.gpu.loss_scale",
    "batch_norm_relu": "bigstep.gpu.batch_norm",
    "lars_step": "bigstep.gpu.lars",
    "optimize": "bigstep.gpu.transform",
    "set_groups": "bigstep.gpu.transform",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bigstep.gpu' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
