"""Frameworks that start ranks themselves: Lightning is told how many the examination runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from bigstep.doctor.observe.recorder import Recorder, replace

__all__ = ["install"]


def install(recorder: Recorder, name: str) -> None:
    """Observe Lightning, which was just imported by this name."""
    trainer = importlib.import_module(name).Trainer
    replace(trainer, "__init__", lambda original: _with_ranks(recorder, original))


def _with_ranks(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        named["devices"] = recorder.settings.ranks  # the examination has started them already
        named["num_nodes"] = 1
        original(self, *arguments, **named)

    return __init__
