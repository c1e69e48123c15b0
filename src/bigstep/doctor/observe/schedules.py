"""Schedulers: how often they are stepped, and after how many steps their shape ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler

from bigstep.doctor.facts import Schedule
from bigstep.doctor.observe.recorder import Recorder, replace
from bigstep.doctor.observe.updates import remember

__all__ = ["install", "schedulers"]

schedulers: list[weakref.ref[Any]] = []


def install(recorder: Recorder) -> None:
    """Observe every scheduler of torch."""
    classes = [c for c in vars(lr_scheduler).values() if isinstance(c, type) and "step" in vars(c)]
    for scheduler in classes:
        replace(scheduler, "step", lambda original: _observed_schedule(recorder, original))


_stepping: list[int] = []


def _observed_schedule(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *arguments: Any, **named: Any) -> Any:
        outermost = not _stepping  # a chain of schedulers steps its parts itself
        _stepping.append(1)
        try:
            result = original(self, *arguments, **named)
        finally:
            _stepping.pop()
        starting = not hasattr(self, "_doctor_started")  # the constructor takes a first step itself
        if starting:
            self._doctor_started = True
            remember(schedulers, self)
        if outermost and not (starting and getattr(self, "last_epoch", 1) <= 0):
            rate = float(self.optimizer.param_groups[0]["lr"]) if hasattr(self, "optimizer") else 0.0
            recorder.write(
                Schedule(
                    scheduler=type(self).__name__,
                    position=int(getattr(self, "last_epoch", 0)),
                    horizon=horizon_of(self),
                    rate=rate,
                    line=recorder.line(),
                )
            )
        return result

    return step


def horizon_of(scheduler: Any) -> int:
    """Return the number of steps until a scheduler's shape ends; 0 where it has no end that can be read."""
    known = getattr(scheduler, "_doctor_horizon", None)
    if known is None:
        known = scheduler._doctor_horizon = _horizon(scheduler)
    return int(known)


def _horizon(scheduler: Any) -> int:
    for name in ("total_steps", "T_max", "total_iters"):
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and type(scheduler).__name__ not in ("LinearLR", "ConstantLR"):
            return value
    parts = getattr(scheduler, "_schedulers", None)
    if parts and getattr(scheduler, "_milestones", None):
        last = horizon_of(parts[-1])
        return int(scheduler._milestones[-1]) + last if last else 0
    functions = getattr(scheduler, "lr_lambdas", None)
    return _first_zero(functions[0]) if functions else 0


def _first_zero(function: Callable[[int], float]) -> int:
    """Return the step at which a factor of the rate, having been above zero, reaches zero; 0 if it never does.

    The function is called for steps that the program may never take, where it need not have a value: a table ends, and
    (1 - step / last) ** 0.9 is complex beyond its end.
    """
    highest, step = 0.0, 0
    while step < 10_000_000:
        try:
            factor = function(step)
            value = 0.0 if isinstance(factor, complex) else float(factor)
        except Exception:  # the function is the program's own, and may fail in any way
            return 0
        highest = max(highest, value)
        if highest > 0 and value <= 1e-6 * highest and step:
            return step
        step += max(1, step // 200)
    return 0
