"""Values that the user's own code fetches from tensors one by one: on a GPU each waits for all queued work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from bigstep.doctor.observe.clock import now
from bigstep.doctor.observe.recorder import Recorder, replace

__all__ = ["install"]


def install(recorder: Recorder) -> None:
    """Observe `item`, `tolist` and `float(tensor)`."""
    for name in ("item", "tolist", "__float__"):
        replace(torch.Tensor, name, lambda original: _observed(recorder, original))


def _observed(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def fetch(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if recorder.looking or not recorder.owns(sys._getframe(1).f_code):
            return original(self, *arguments, **named)
        began = now()
        value = original(self, *arguments, **named)
        tally = recorder.tally
        tally.sync_s += now() - began
        tally.syncs += 1
        if not tally.sync_line:
            tally.sync_line = recorder.line()
        return value

    return fetch
