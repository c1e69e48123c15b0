"""What exists, by name: optimizers, shapes of schedules, models, methods, collectives, codecs, data sets.

One module per kind, each with a frozen entry and one dict from name to entry. An entry says what its name means, what
it goes with and where its code is; the code itself is imported by `load` only when it is used, so that checks, planner
and help need no torch. To add one takes a file with the code and an entry here.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from bigstep.errors import ConfigError, nearest

__all__ = ["find", "load", "load_own"]

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


def load_own(path: str, field: str) -> Any:
    """Import a user's own `package.module:name`; the current folder is searched too, last.

    Args:
        path: An import path with a colon before the name.
        field: The field that names it, for messages.

    >>> load_own("bigstep.schedules:join", "loss.name").__name__
    'join'
    """
    module_name, _, name = path.partition(":")
    if not module_name or module_name.startswith(".") or not name:
        raise ConfigError(f"{field}: {path} is not an import path; write package.module:name.")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last, so that a user's file never hides an installed package
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{field}: {path}: there is no module {error.name!r}; install it or run from the folder that holds it."
            ) from None
        raise  # a module that the user's own file imports is missing: show that traceback
    found = getattr(module, name, None)
    if not callable(found):
        public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(f"{field}: {path}: {module_name} has no function {name!r}: {nearest(name, public)}")
    return found
