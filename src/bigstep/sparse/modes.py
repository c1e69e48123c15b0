"""How threads share the weights: the disciplines that can be compared, by name."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bigstep.errors import ConfigError, nearest
from bigstep.sparse.kernels.hogwild import AIG, ATOMIC, CACHED, LOCKED, PLAIN, ROUND_ROBIN

__all__ = ["MODES", "ModeName", "mode_of"]

ModeName = Literal["hogwild", "racing", "cached", "aig", "locked", "round_robin", "serial"]


@dataclasses.dataclass(frozen=True)
class Mode:
    """One discipline."""

    discipline: int
    """What the kernels call it."""
    meaning: str


MODES = {
    "hogwild": Mode(ATOMIC, "no locks and no copies; each addition is a compare-exchange, so none is lost"),
    "racing": Mode(PLAIN, "no locks and no copies; additions are plain, so one may be lost where two threads meet"),
    "cached": Mode(CACHED, "each thread has a copy of the frequent weights and adds its changes under a lock"),
    "aig": Mode(AIG, "a lock for each coordinate; an update takes the locks of all coordinates of its example"),
    "locked": Mode(LOCKED, "one lock around read, gradient and update: the serial result, bit for bit"),
    "round_robin": Mode(ROUND_ROBIN, "gradients in parallel, updates in the fixed order of the threads"),
    "serial": Mode(PLAIN, "one thread"),
}


def mode_of(name: str, *, without: str = "") -> Mode:
    """Return a mode by its name; an estimator may be `without` one.

    >>> mode_of("locked").meaning
    'one lock around read, gradient and update: the serial result, bit for bit'
    """
    known = [mode for mode in MODES if mode != without]
    if name not in known:
        raise ConfigError(f"mode={name!r:.60} is not known; {nearest(str(name), known)}")
    return MODES[name]
