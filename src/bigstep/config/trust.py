"""Code that a file names: `package.module:function` will be run, so the user must have allowed it.

What is typed on the command line is trusted; what stands in a configuration, a suite or the folder of a run is not,
without `--trust` or BIGSTEP_TRUST=1. Functions of Python itself (os:system) are never accepted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from bigstep.errors import require

__all__ = ["CODE", "VARIABLE", "names_code", "require_own", "require_trust"]

VARIABLE = "BIGSTEP_TRUST"
"""Environment variable; 1 means that all files may name code."""
CODE = ("model", "data.name", "optimizer.name", "loss.name")
"""Fields of a configuration that may name code."""
_LIBRARIES = ("timm", "hf")
"""Prefixes that stand for a library, not for a user's module."""


def names_code(name: str) -> bool:
    """Whether a name stands for user code.

    >>> names_code("small"), names_code("timm:vit_tiny"), names_code("mine.models:network")
    (False, False, True)
    """
    return ":" in name and name.partition(":")[0] not in _LIBRARIES


def require_own(name: str, field: str) -> None:
    """Refuse functions of Python itself: none of them builds a part of a run, and some do harm."""
    package = name.partition(":")[0].partition(".")[0]
    require(
        not names_code(name) or package not in sys.stdlib_module_names,
        f"{field} is {name!r:.60}, but {package} is a module of Python itself: name a function of your own package.",
    )


def require_trust(names: Iterable[str], origin: object, *, trusted: bool = False) -> None:
    """Refuse to run code that a file names, unless the user has allowed it.

    Args:
        names: Models, data sets, update rules, losses and recipes, as the file names them.
        origin: The file or folder, for the message.
        trusted: Whether --trust was given.
    """
    code = sorted(filter(names_code, names))
    require(
        trusted or not code or os.environ.get(VARIABLE) == "1",
        f"{origin} names {' and '.join(code)!s:.120}, which would run code of that module: read it, then add --trust "
        f"(or set {VARIABLE}=1).",
    )
