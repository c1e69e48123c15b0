"""Checkpoints: who writes which file, and what of the program's state is in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bigstep.doctor.facts import Load, Save
from bigstep.doctor.observe import schedules, updates
from bigstep.doctor.observe.recorder import Recorder, replace

__all__ = ["install"]

_COUNTERS = ("epoch", "step", "iter", "global_step", "iteration")


def install(recorder: Recorder) -> None:
    """Observe `torch.save` and `torch.load`."""
    replace(torch, "save", lambda original: _observed_save(recorder, original))
    replace(torch, "load", lambda original: _observed_load(recorder, original))
    torch.serialization.save = torch.save
    torch.serialization.load = torch.load


def _observed_save(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: Any, f: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            recorder.judge_file(f)  # torch writes natively, which Python does not announce
            holds = tuple(sorted(set(_holdings(obj))))
            if "weights" in holds and recorder.updates:
                recorder.look_until = recorder.updates + 2
            recorder.write(
                Save(
                    path=_place(recorder, f),
                    holds=holds,
                    lacks=tuple(part for part in _carried() if part not in holds),
                    resumable="counter" in holds or "optimizer" in holds,
                    updates=recorder.updates,
                    line=recorder.line(),
                )
            )
        return original(obj, f, *arguments, **named)

    return save


def _observed_load(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            recorder.write(Load(path=_place(recorder, f), line=recorder.line()))
        return original(f, *arguments, **named)

    return load


def _place(recorder: Recorder, path: str | os.PathLike[str]) -> str:
    full = os.path.realpath(path)
    root = recorder.settings.root + os.sep
    return full.removeprefix(root)


def _carried() -> Iterator[str]:
    """Yield what the program carries from step to step besides the weights."""
    found = [reference() for reference in updates.optimizers]
    if any(o is not None and any(len(state) for state in o.state.values()) for o in found):
        yield "optimizer"
    if any(reference() is not None for reference in schedules.schedulers):
        yield "scheduler"
    if any((scaler := reference()) is not None and scaler.is_enabled() for reference in updates.scalers):
        yield "scaler"


def _holdings(value: Any, name: str = "", depth: int = 4) -> Iterator[str]:
    """Yield what a saved object holds, judged by its structure; only counters are found by name."""
    if isinstance(value, torch.nn.Module):
        yield "weights"
    elif isinstance(value, torch.optim.Optimizer):
        yield "optimizer"
    elif isinstance(value, Mapping):
        keys = {str(key) for key in value}
        if {"state", "param_groups"} <= keys:
            yield "optimizer"
        elif "last_epoch" in keys and "_step_count" in keys:
            yield "scheduler"
        elif {"scale", "growth_factor"} <= keys:
            yield "scaler"
        elif value and all(isinstance(each, Tensor) for each in value.values()):
            yield "weights"
        elif depth:
            for key, each in value.items():
                yield from _holdings(each, str(key), depth - 1)
    elif isinstance(value, list | tuple) and depth:
        for each in value:
            yield from _holdings(each, name, depth - 1)
    elif isinstance(value, int) and any(word in name.lower() for word in _COUNTERS):
        yield "counter"
