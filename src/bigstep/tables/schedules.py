"""Shapes of a schedule's pieces by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from bigstep.tables import load
from bigstep.tables.plugins import Table
from bigstep.validate import require_name

__all__ = ["SHAPES", "Shape", "make_schedule"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One curve."""

    about: str
    """One sentence, for help and documents."""
    home: str
    """Where the function is that gives the schedule."""
    takes: Mapping[str, str]
    """Its arguments, each with the field of a piece that gives it; `begin` is where the piece before it ended."""


_CURVE = {"start": "start", "end": "end", "begin": "begin", "until": "until"}

SHAPES: dict[str, Shape] = {
    "constant": Shape(about="start throughout", home="bigstep.schedules:constant", takes={"value": "start"}),
    "warmup": Shape(about="a straight line up from start to end", home="bigstep.schedules:warmup", takes=_CURVE),
    "linear": Shape(about="a straight line from start to end", home="bigstep.schedules:linear", takes=_CURVE),
    "polynomial": Shape(
        about="end + (start - end) * (1 - t)**power",
        home="bigstep.schedules:polynomial",
        takes={**_CURVE, "power": "power"},
    ),
    "cosine": Shape(about="half a cosine from start to end", home="bigstep.schedules:cosine", takes=_CURVE),
    "step": Shape(
        about="start, multiplied by factor at each epoch of `at`",
        home="bigstep.schedules:step_decay",
        takes={"value": "start", "at": "at", "factor": "factor"},
    ),
    "table": Shape(
        about="the next of `values` from each epoch of `at` on",
        home="bigstep.schedules:table",
        takes={"at": "at", "values": "values"},
    ),
    "slow_start": Shape(
        about="what follows the RMSprop warm-up: half of start for long, then three steep drops (Akiba et al. 2017)",
        home="bigstep.schedules:slow_start",
        takes={"peak": "start", "epochs": "until"},
    ),
}

SHAPES = Table("schedules", Shape, SHAPES)


def make_schedule(shape: str, fields: Mapping[str, Any]) -> Callable[[float], float]:
    """Return one piece of a schedule, from those of `fields` that its shape takes.

    >>> make_schedule("cosine", {"start": 1.0, "end": 0.0, "begin": 0, "until": 90, "power": 2.0})(45)
    0.5
    """
    require_name(shape, SHAPES, "lr.schedule.shape")
    entry = SHAPES[shape]
    made = load(entry.home)(**{argument: fields[name] for argument, name in entry.takes.items()})
    return cast(Callable[[float], float], made)
