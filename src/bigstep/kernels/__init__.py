"""Kernels behind plain functions; each has a plain-torch twin that is its specification.

Importing this package imports neither triton nor numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigstep.kernels.batch_norm import batch_norm_relu
    from bigstep.kernels.graphs import GraphedStep
    from bigstep.kernels.lars import lars_step
    from bigstep.kernels.transform import optimize, set_groups

__all__ = ["GraphedStep", "batch_norm_relu", "lars_step", "optimize", "set_groups"]

_HOME = {
    "GraphedStep": "bigstep.kernels.graphs",
    "batch_norm_relu": "bigstep.kernels.batch_norm",
    "lars_step": "bigstep.kernels.lars",
    "optimize": "bigstep.kernels.transform",
    "set_groups": "bigstep.kernels.transform",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bigstep.kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
