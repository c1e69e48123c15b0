"""Import torch for a command that needs it, without the time that the garbage collector adds."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator

__all__ = ["collector_off", "leave_out_compiler"]


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Import inside this: the collector is off meanwhile, and never scans what was imported until the process ends.

    Importing torch makes hundreds of thousands of objects that live as long as the process; scanning them again and
    again takes a fifth of the import.

    If torch is imported already, this is a part of another program, whose collector is left alone.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else extension modules complain at exit about objects not freed
        gc.enable()


def leave_out_compiler() -> None:
    """Keep the optimizers of this process from importing torch's compiler, which takes two seconds.

    torch imports it when a method of an Optimizer is first called, only to exclude the method from compilation: here
    the method is marked as excluded. torch's own rules import it in every step for the same purpose: here a step is
    replaced by its plain function under no_grad, in which torch would run it too. With a release of torch that does
    either in another way, the compiler is imported as before. Not for a process that has imported torch already: this
    changes classes of torch, which another program may use there.
    """
    from torch import no_grad, optim

    for method in vars(optim.Optimizer).values():
        if (plain := getattr(method, "__wrapped__", None)) is not None:
            plain.__dynamo_disable = plain
    for rule in vars(optim).values():
        if isinstance(rule, type) and (plain := getattr(getattr(rule, "step", None), "__wrapped__", None)) is not None:
            rule.step = no_grad()(plain)  # type: ignore[attr-defined]  # `rule` is an Optimizer
