"""Importing torch for a command that needs it, without what the garbage collector adds to that."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator

__all__ = ["collector_off", "leave_out_compiler"]


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Import inside this: the collector rests meanwhile, and leaves what was imported alone until the process ends.

    Importing torch makes hundreds of thousands of objects that live as long as the process; looking through them again
    and again is a fifth of the time that it takes.

    Where torch is imported already, this is somebody else's program, and its collector is left as it is.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else extension modules tell of what they find not taken apart
        gc.enable()


def leave_out_compiler() -> None:
    """Let the optimizers of this process do without torch's compiler, which takes two seconds to import.

    torch imports it when a method of an Optimizer is first called, only to tell it to leave the method alone: here that
    is noted as done. And in every step of its own rules, to keep it out of that too: here a step does without, and
    without gradients, as it would. A release that does either in another way imports the compiler as before. Not for a
    process that has imported torch already: this changes classes of torch, which are somebody else's there.
    """
    from torch import no_grad, optim

    for method in vars(optim.Optimizer).values():
        if (plain := getattr(method, "__wrapped__", None)) is not None:
            plain.__dynamo_disable = plain
    for rule in vars(optim).values():
        if isinstance(rule, type) and (plain := getattr(getattr(rule, "step", None), "__wrapped__", None)) is not None:
            rule.step = no_grad()(plain)  # type: ignore[attr-defined]  # `rule` is an Optimizer
