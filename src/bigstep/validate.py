"""Plain values -> frozen dataclasses: the one place that checks types, ranges and names of what people write.

The annotations of a dataclass are its rules. `count: Count` takes whole numbers above 0; an unknown field names its
nearest neighbour; a value of the wrong kind names the field and what it takes. Configurations, suites and clusters are
all read through `build`, and `check_ranges` holds values that are set in Python to the same ranges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from bigstep.errors import ConfigError, nearest, require

__all__ = [
    "FRACTION", "NOT_NEGATIVE", "POSITIVE", "Count", "Fraction", "NotNegative", "Positive", "Range", "WholeNotNegative",
    "build", "check_range", "check_ranges", "convert", "require_name",
    "speak",
]  # fmt: skip

T = TypeVar("T")

_WORDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping", list: "a list",
    types.NoneType: "nothing",
}  # fmt: skip


@dataclass(frozen=True)
class Range:
    """Which values a field takes, and how a sentence says it: "x is -1, but it must ..."."""

    holds: Callable[[Any], bool]
    words: str


POSITIVE = Range(lambda value: value > 0, "be greater than 0")
NOT_NEGATIVE = Range(lambda value: value >= 0, "not be negative")
FRACTION = Range(lambda value: 0 <= value < 1, "be at least 0 and less than 1")

Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Fraction = Annotated[float, FRACTION]
Count = Annotated[int, POSITIVE]
WholeNotNegative = Annotated[int, NOT_NEGATIVE]


def build(cls: type[T], mapping: Any, where: str = "", whole: str = "the configuration") -> T:
    """Build a dataclass from plain dicts, lists and scalars; in messages `where` is the path of its fields.

    A class with a method `choose` decides itself which class is built from a mapping.

    >>> @dataclass(frozen=True)
    ... class Point:
    ...     across: float
    ...     down: float = 0.0
    >>> build(Point, {"across": 1})
    Point(across=1.0, down=0.0)
    >>> build(Point, {"acros": 1}, "point")
    Traceback (most recent call last):
    bigstep.errors.ConfigError: Unknown field 'point.acros': did you mean 'point.across'?
    """
    name = where or whole
    if not isinstance(mapping, Mapping):
        inner = f"; set {where}.{dataclasses.fields(cast(Any, cls))[0].name}, or another of its fields" if where else ""
        raise ConfigError(f"{name} must be a mapping of fields to values (got {mapping!r:.60}){inner}.")
    if choose := getattr(cls, "choose", None):
        cls, mapping = choose(mapping)
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
    prefix = f"{where}." if where else ""
    for key in mapping:
        if key not in fields:
            path = f"{prefix}{key}"
            raise ConfigError(f"Unknown field {path!r:.80}: {nearest(path, [prefix + name for name in fields])}")
    arguments = {key: convert(_hints(cast(Any, cls))[key], value, prefix + key) for key, value in mapping.items()}
    for key, field in fields.items():
        if key not in arguments and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{name} lacks the field {key!r}; add it.")
    return cls(**arguments)


def convert(hint: Any, value: Any, path: str) -> Any:
    """Convert a plain value to the type of a field, or say what the field takes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(cast(type, hint), value, path)
    if origin is Annotated:
        return convert(arguments[0], value, path)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} takes a list (got {value!r:.60}).")
        return tuple(convert(arguments[0], item, path) for item in value)
    if origin is Literal:
        if isinstance(value, str):
            require_name(value, arguments, path)
        for allowed in arguments:
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
                return allowed  # 2 for 2.0; true equals 1, but is no number
        raise ConfigError(f"{path} is {value!r:.60}, but {nearest(str(value), map(str, arguments))}")
    if origin in (typing.Union, types.UnionType):
        lists = [alternative for alternative in arguments if typing.get_origin(alternative) is tuple]
        if lists and isinstance(value, (list, tuple)):
            return convert(lists[0], value, path)  # so that the message says what is wrong in the list
        for alternative in arguments:
            with contextlib.suppress(ConfigError):
                return convert(alternative, value, path)
        raise ConfigError(f"{path} takes {speak(hint)} (got {value!r:.60}).")
    if hint in (dict, list, types.NoneType) and isinstance(value, hint):
        return value
    return _scalar(hint, value, path)


def check_ranges(instance: Any, where: str = "") -> None:
    """Refuse a dataclass in which a value lies outside the range that annotates its field.

    >>> @dataclass(frozen=True)
    ... class Batch:
    ...     size: Count
    >>> check_ranges(Batch(0), "batch")
    Traceback (most recent call last):
    bigstep.errors.ConfigError: batch.size is 0, but it must be greater than 0.
    """
    for name, bound in _ranges(cast(Any, type(instance))):
        value = getattr(instance, name)
        if not isinstance(value, (str, types.NoneType)):  # another member of a union
            check_range(value, bound, f"{where}.{name}" if where else name)


def check_range(value: Any, bound: Range, path: str) -> None:
    """Refuse a value that lies outside a range."""
    shown = list(value) if isinstance(value, tuple) else value
    require(bound.holds(value), f"{path} is {shown!s:.80}, but it must {bound.words}.")


def require_name(given: str, allowed: Collection[str], path: str) -> None:
    """Refuse a name that is not in a table, and suggest the nearest that is.

    >>> require_name("larz", {"sgd": 1, "lars": 2}, "optimizer.name")
    Traceback (most recent call last):
    bigstep.errors.ConfigError: optimizer.name is 'larz', but did you mean 'lars'?
    """
    if given not in allowed:
        raise ConfigError(f"{path} is {given!r:.60}, but {nearest(given, allowed)}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def _ranges(cls: type) -> tuple[tuple[str, Range], ...]:
    return tuple((name, bound) for name, hint in _hints(cls).items() for bound in _ranges_of(hint))


def _ranges_of(hint: Any) -> Iterator[Range]:
    if typing.get_origin(hint) is Annotated:
        yield from (mark for mark in typing.get_args(hint)[1:] if isinstance(mark, Range))
    elif typing.get_origin(hint) in (typing.Union, types.UnionType):
        for alternative in typing.get_args(hint):
            yield from _ranges_of(alternative)


def _scalar(hint: Any, value: Any, path: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        with contextlib.suppress(ValueError):
            value, is_number = float(value), True
    finite = is_number and abs(value) <= sys.float_info.max  # NaN compares false
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and finite and int(value) == value:
        return int(value)
    if hint is float and finite:
        return float(value)
    if hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{path} takes {speak(hint)} (got {value!r:.60}).")


def speak(hint: Any) -> str:
    """Say what a field takes.

    >>> speak(Literal["auto"] | Positive)
    'auto or a number'
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return speak(arguments[0])
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return "a list"
    if dataclasses.is_dataclass(hint):
        return "a mapping"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(speak, arguments))
    return _WORDS.get(hint, str(hint))
