"""Synchronous training on logical workers: `fit` from Python, `bigstep train` from a shell; `load` what was trained.

The public names are loaded when they are used, so that the command line can start ranks without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigstep.engine.fit import FitResult, fit
    from bigstep.engine.weights import Loaded, load

__all__ = ["FitResult", "Loaded", "fit", "load"]

_HOMES = {"FitResult": "fit", "fit": "fit", "Loaded": "weights", "load": "weights"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"bigstep.engine.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'bigstep.train' has no attribute {name!r}")
