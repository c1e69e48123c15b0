"""What installed packages add to the tables, through entry points of Python's packaging.

A package that declares, say, `[project.entry-points."bigstep.optimizers"]` with `lion = "my_package.entries:LION"` adds
the name `lion`. Its entry is loaded only when the name is first asked for and not known here, so that starting costs
nothing; a name of bigstep's own is never replaced. Installing a package means trusting it: such names need no --trust.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from bigstep.errors import ConfigError
from bigstep.tables import load

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUPS", "Table", "brought", "load_brought"]

GROUPS = ("recipes", "optimizers", "models", "datasets", "schedules")
"""Kinds of names that a package may add, each as the entry-point group `bigstep.KIND`."""

Entry = TypeVar("Entry")


@functools.cache
def brought(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a kind that installed packages bring, by name, not yet loaded."""
    from importlib.metadata import entry_points  # takes longer than most commands, and few need it

    assert group in GROUPS
    return {point.name: point for point in entry_points(group=f"bigstep.{group}")}


def load_brought(group: str, name: str, kind: type) -> Any:
    """Load one of them, or say which package it belongs to and why it cannot be used."""
    point = brought(group)[name]
    owner = point.dist.name if point.dist is not None else point.module
    try:
        entry = point.load()
    except Exception as error:  # somebody else's module can raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{name!r} of the package {owner} cannot be loaded ({type(error).__name__}: {reason:.120}): repair or "
            "uninstall that package."
        ) from None
    if not isinstance(entry, kind):
        raise ConfigError(
            f"{name!r} of the package {owner} is a {type(entry).__name__}, but bigstep.{group} takes {kind.__name__}: "
            "repair or uninstall that package."
        )
    return entry


class Table(dict[str, Entry]):
    """Entries by name; a name that is missing is looked for among what installed packages bring.

    >>> table = Table("models", int, {"one": 1})
    >>> "one" in table, "two" in table, list(table)
    (True, False, ['one'])
    """

    def __init__(self, group: str, kind: type[Entry], entries: dict[str, Entry], own: str = "") -> None:
        """`own` names the function that gives the entry of a user's own `package.module:name`; empty for none."""
        super().__init__(entries)
        self._group, self._kind, self._own = group, kind, own

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        return isinstance(name, str) and (bool(self._own and ":" in name) or name in brought(self._group))

    def __missing__(self, name: str) -> Entry:
        if self._own and ":" in name:
            entry: Entry = load(self._own)(name)
            return entry
        if name not in brought(self._group):
            raise KeyError(name)
        self[name] = load_brought(self._group, name, self._kind)
        return self[name]
