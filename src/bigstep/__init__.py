"""Distributed SGD for PyTorch: every published way of training with many workers, on one platform.

Importing this package does not import torch; the public pieces are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> the module that defines it
_PUBLIC = {
    "LARS": "optim",
    "RMSpropWarmup": "optim",
    "parameter_groups": "optim",
    "Exchange": "comm",
    "GhostBatchNorm2d": "norm",
    "HogwildClassifier": "sparse",
    "HogwildFactorizer": "sparse",
    "fit": "train",
    "RunConfig": "config",
    "ConfigError": "errors",
    "DataError": "errors",
    "RunError": "errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"bigstep.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'bigstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
