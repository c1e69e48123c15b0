"""Asynchronous SGD on networks: locked, Hogwild! and Downpour, as siblings of the synchronous loop.

The public names are loaded when they are used, so that the command line can read a configuration without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigstep.asynchronous.training import (
        join_downpour,
        serve_downpour,
        train_downpour,
        train_hogwild,
        train_locked,
    )

__all__ = ["join_downpour", "serve_downpour", "train_downpour", "train_hogwild", "train_locked"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from bigstep.asynchronous import training

        return getattr(training, name)
    raise AttributeError(f"module 'bigstep.asynchronous' has no attribute {name!r}")
