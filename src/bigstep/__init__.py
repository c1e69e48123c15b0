"""Distributed SGD for PyTorch: every published way of training with many workers, on one platform.

Importing this package does not import torch; the public pieces are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that type checkers see what `__getattr__` brings
    from bigstep.comm import Exchange as Exchange
    from bigstep.config import RunConfig as RunConfig
    from bigstep.errors import ConfigError as ConfigError
    from bigstep.errors import DataError as DataError
    from bigstep.errors import RunError as RunError
    from bigstep.norm import GhostBatchNorm2d as GhostBatchNorm2d
    from bigstep.optim import LAMB as LAMB
    from bigstep.optim import LARS as LARS
    from bigstep.optim import Muon as Muon
    from bigstep.optim import RMSpropWarmup as RMSpropWarmup
    from bigstep.optim import parameter_groups as parameter_groups
    from bigstep.sparse import HogwildClassifier as HogwildClassifier
    from bigstep.sparse import HogwildFactorizer as HogwildFactorizer
    from bigstep.train import fit as fit
    from bigstep.train import load as load

__version__ = "0.2.0"

# public name -> the module that defines it
_PUBLIC = {
    "LAMB": "optim",
    "LARS": "optim",
    "Muon": "optim",
    "RMSpropWarmup": "optim",
    "parameter_groups": "optim",
    "Exchange": "comm",
    "GhostBatchNorm2d": "norm",
    "HogwildClassifier": "sparse",
    "HogwildFactorizer": "sparse",
    "fit": "train",
    "load": "train",
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
