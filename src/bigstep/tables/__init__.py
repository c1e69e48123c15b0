"""What exists, by name: optimizers, shapes of schedules, models, methods, collectives, codecs, data sets.

One module a kind, each with a frozen entry and one dict from name to entry. An entry says what its name means, what it
goes with and where its code is; the code itself is imported by `load` only when it is used, so that checks, planner and
help need no torch. To add one is one file with the code and one entry here.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["load"]


def load(home: str) -> Any:
    """Import what an entry calls its home, written `package.module:name`.

    >>> load("math:sqrt")(9.0)
    3.0
    """
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)
