"""A last look before the program ends: what each rank carries, and what its data sets hold."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.doctor.facts import Held, State
from bigstep.doctor.observe import data, models
from bigstep.doctor.observe.digest import biggest, digest, is_plain, rows, sample
from bigstep.doctor.observe.recorder import Recorder

__all__ = ["install"]

SAMPLES = 2048
"""Samples of a data set that are read at the end, at most."""
READING_S = 2.0
"""Seconds that reading them may take, for each data set."""


def install(recorder: Recorder) -> None:
    """Look when the program ends."""
    recorder.before_end.append(lambda: _look(recorder))


def _look(recorder: Recorder) -> None:
    for name, module in _roots():
        plain = [b for b in module.buffers() if b.is_floating_point()]
        recorder.write(
            State(what="parameters", name=name, digest=digest(module.parameters()), updates=recorder.updates)
        )
        if plain:
            recorder.write(State(what="buffers", name=name, digest=digest(plain), updates=recorder.updates))
    for name, tensors in _averages():
        recorder.write(State(what="average", name=name, digest=digest(tensors), updates=recorder.updates))
    for number, loader in data.loaders.items():
        held = tuple(_held(loader.dataset))
        if held:
            recorder.write(Held(loader=number, rows=held))


def _roots() -> Iterator[tuple[str, nn.Module]]:
    """Yield the models that were called, without their wrappers."""
    seen: set[int] = set()
    for reference in models.called.values():
        module = reference()
        while module is not None and isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield type(module).__name__, module


def _averages() -> Iterator[tuple[str, list[Tensor]]]:
    """Yield copies of a model kept beside it: modules of the same shapes, or dicts that map its names to tensors."""
    shapes: dict[tuple[Any, ...], list[Tensor]] = {}
    own: set[int] = set()
    names: dict[str, Tensor] = {}
    for _, module in _roots():
        parameters = dict(module.named_parameters())
        shapes[tuple(p.shape for p in parameters.values())] = list(parameters.values())
        own |= {id(m) for m in module.modules()} | {id(p) for p in parameters.values()}
        names |= parameters
    if not names:
        return
    for thing in gc.get_objects():
        try:
            kind = type(thing)  # isinstance would ask the object, and some then warn
            if issubclass(kind, nn.parallel.DistributedDataParallel) or id(thing) in own:
                continue
            if issubclass(kind, nn.Module):
                copies: list[Tensor] = list(thing.parameters())
                weights = shapes.get(tuple(p.shape for p in copies))
                if weights and not any(id(p) in own for p in copies) and _follows(copies, weights):
                    yield type(thing).__name__, copies
            elif kind is dict and len(thing) >= len(names) and names.keys() <= thing.keys():
                values = [thing[n] for n in sorted(names)]
                alike = all(isinstance(v, Tensor) and id(v) not in own for v in values)
                if alike and _follows(values, [names[n] for n in sorted(names)]):
                    yield "dictionary", values
        except (ReferenceError, TypeError, RuntimeError):
            continue


def _follows(copies: list[Tensor], weights: list[Tensor]) -> bool:
    """Whether tensors point in the direction of the weights; others kept by their names, as residuals, may differ."""
    pairs = [(c, w) for c, w in zip(copies, weights, strict=True) if is_plain(c) and is_plain(w)]
    if not pairs or any(c.shape != w.shape for c, w in pairs):
        return not pairs
    first, second = (torch.cat([sample(t).cpu().float() for t in each]) for each in zip(*pairs, strict=True))
    return bool(first @ second >= 0.5 * first.norm() * second.norm())


def _held(dataset: Any) -> Iterator[str]:
    """Read a data set from its start, as far as time allows, and digest what it gives.

    A subset is told by its indices, which augmentation does not change.
    """
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        chosen = data.base_indices(dataset, range(min(len(dataset), SAMPLES)))
        yield from (f"#{index}" for index in chosen)
        return
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, Mapping):
        return
    deadline = time.monotonic() + READING_S
    try:
        count = min(len(dataset), SAMPLES)
    except TypeError:
        return
    for index in range(count):
        if time.monotonic() > deadline:
            return
        sample = dataset[index]
        tensor = biggest([torch.as_tensor(v) for v in _values(sample)])
        if tensor is None:
            return
        yield rows(tensor.reshape(1, -1))[0]


def _values(sample: Any) -> list[Any]:
    values = (
        list(sample.values())
        if isinstance(sample, Mapping)
        else sample
        if isinstance(sample, tuple | list)
        else [sample]
    )
    return [v for v in values if isinstance(v, Tensor) or hasattr(v, "__array__")]
