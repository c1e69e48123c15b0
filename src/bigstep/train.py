"""Synchronous training on logical workers: `fit` from Python, `bigstep train` from a shell.

The public names are loaded when they are used, so that the command line can start ranks without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigstep.engine.fit import FitResult, fit

__all__ = ["FitResult", "fit"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from bigstep.engine import fit as home

        return getattr(home, name)
    raise AttributeError(f"module 'bigstep.train' has no attribute {name!r}")
