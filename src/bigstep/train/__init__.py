"""Synchronous training on logical workers: `fit` from Python, `bigstep train` from a shell.

The public names are loaded when they are used, so that the command line can start ranks without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigstep.train.fitting import FitResult, fit

__all__ = ["FitResult", "fit"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from bigstep.train import fitting

        return getattr(fitting, name)
    raise AttributeError(f"module 'bigstep.train' has no attribute {name!r}")
