"""Numbers from YAML: each field has its unit in its name, and a wrong field is reported in one sentence.

A quantity such as `bandwidth` may be written as bandwidth_gbit_s, bandwidth_mbit_s or bandwidth_gbyte_s; inside the
planner everything is in bytes, seconds and floating-point operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bigstep.errors import ConfigError, nearest
from bigstep.validate import NOT_NEGATIVE, POSITIVE, check_range, convert

__all__ = ["Quantity", "read_fields"]


@dataclasses.dataclass(frozen=True)
class Quantity:
    """One number in a file: the field names it may have, each with its factor to SI units."""

    units: dict[str, float]
    default: float | None = None
    zero_allowed: bool = False
    whole: bool = False

    @property
    def first(self) -> str:
        """The field name used in messages and in files that bigstep writes."""
        return next(iter(self.units))


RATE = {"gbit_s": 1e9 / 8, "mbit_s": 1e6 / 8, "gbyte_s": 1e9, "mbyte_s": 1e6}
TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZE = {"gib": 2.0**30, "mib": 2.0**20}


def rate(name: str, default: float | None = None) -> Quantity:
    """A data rate."""
    return Quantity({f"{name}_{unit}": factor for unit, factor in RATE.items()}, default)


def duration(name: str, default: float | None = None) -> Quantity:
    """A time, which may be zero."""
    return Quantity({f"{name}_{unit}": factor for unit, factor in TIME.items()}, default, zero_allowed=True)


def size(name: str, default: float | None = None) -> Quantity:
    """An amount of memory."""
    return Quantity({f"{name}_{unit}": factor for unit, factor in SIZE.items()}, default)


def count(name: str, default: float | None = None, *, zero_allowed: bool = False) -> Quantity:
    """A whole number."""
    return Quantity({name: 1.0}, default, zero_allowed, whole=True)


def number(name: str, default: float | None = None, *, factor: float = 1.0, zero_allowed: bool = False) -> Quantity:
    """A plain number, scaled by `factor`."""
    return Quantity({name: factor}, default, zero_allowed)


def read_fields(
    mapping: Any, quantities: Mapping[str, Quantity], others: Mapping[str, type], where: str
) -> dict[str, Any]:
    """Read a mapping of fields, in any of their units, into SI units; `others` are the fields that are not numbers.

    >>> read_fields({"latency_ms": 5}, {"latency_s": duration("latency")}, {}, "inside")
    {'latency_s': 0.005}
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where or 'The file'} must be a mapping of fields to values (got {mapping!r:.60}).")
    prefix = f"{where}." if where else ""
    names = {unit: key for key, quantity in quantities.items() for unit in quantity.units}
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        if name in others:
            values[name] = convert(others[name], value, path)
            continue
        if name not in names:
            raise ConfigError(f"Unknown field {path!r}: {_suggestion(str(name), names, others)}")
        key = names[name]
        if key in values:
            raise ConfigError(f"{path} is given twice, in different units; keep one of them.")
        values[key] = _number(quantities[key], name, value, path)
    for key, quantity in quantities.items():
        if key not in values:
            if quantity.default is None:
                raise ConfigError(f"{where or 'The file'} lacks the field {quantity.first!r}; add it.")
            values[key] = int(quantity.default) if quantity.whole else quantity.default
    return values


def _suggestion(name: str, names: Mapping[str, str], others: Mapping[str, type]) -> str:
    stem = name.rsplit("_", 1)[0] if "_" in name else name
    alike = [unit for unit in names if unit.startswith(f"{name}_") or unit.startswith(f"{stem}_")]
    if alike:
        return f"write it with one of these units: {', '.join(alike)}."
    return nearest(name, [*names, *others])


def _number(quantity: Quantity, name: str, value: Any, path: str) -> float:
    number: float = convert(int if quantity.whole else float, value, path)
    check_range(number, NOT_NEGATIVE if quantity.zero_allowed else POSITIVE, path)
    return number if quantity.whole else number * quantity.units[name]
