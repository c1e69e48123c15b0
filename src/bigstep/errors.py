"""The three ways in which a run fails, and the suggestion of a name for a misspelt one.

A message is one sentence: what was given, what is allowed, what to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BigstepError", "ConfigError", "DataError", "RunError", "nearest", "require"]


class BigstepError(Exception):
    """Anything a person should read as one sentence instead of a traceback."""

    exit_status = 2


class ConfigError(BigstepError, ValueError):
    """What was asked for cannot be run as written (exit status 2)."""


class DataError(BigstepError, ValueError):
    """Data that is missing, corrupt or of the wrong shape; the message names the file (exit status 2)."""


class RunError(BigstepError, RuntimeError):
    """A run that started well went wrong; the message names the rank and the step (exit status 1)."""

    exit_status = 1


def require(holds: bool, sentence: str) -> None:
    """Refuse a configuration with one sentence unless `holds`."""
    if not holds:
        raise ConfigError(sentence)


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return the end of a sentence: it offers the nearest allowed name, or lists them all.

    >>> nearest("sonny", ["fair", "sony", "pfn"])
    "did you mean 'sony'?"
    >>> nearest("x", ["a", "b"])
    'allowed are a, b.'
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(given, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(names)}."
