"""What exists, by name: optimizers, shapes of schedules, models, methods, collectives, codecs, data sets.

One module a kind, each with a frozen entry and one dict from name to entry. An entry says what its name means, what it
goes with and where its code is; the code itself is imported by `load` only when it is used, so that checks, planner and
help need no torch. To add one is one file with the code and one entry here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from bigstep.errors import ConfigError, nearest

__all__ = ["find", "load"]

Entry = TypeVar("Entry")


def find(table: Mapping[str, Entry], kind: str, name: str) -> Entry:
    """Return the entry of `name`, or refuse the name with its nearest neighbour.

    >>> find({"ring": 1, "torus": 2}, "collective", "toros")
    Traceback (most recent call last):
    bigstep.errors.ConfigError: There is no collective 'toros': did you mean 'torus'?
    """
    if name not in table:
        raise ConfigError(f"There is no {kind} {name!r:.80}: {nearest(name, table)}")
    return table[name]


def load(home: str) -> Any:
    """Import what an entry names as `package.module:Name`.

    >>> load("math:gcd")(12, 18)
    6
    """
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)
