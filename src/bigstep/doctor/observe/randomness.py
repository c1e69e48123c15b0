"""Generators: who seeded them, and from which state a loader process first drew."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from bigstep.doctor.facts import Seed, Worker
from bigstep.doctor.observe import data
from bigstep.doctor.observe.recorder import Recorder, replace

__all__ = ["install"]


def install(recorder: Recorder) -> None:
    """Observe seeds, and what is drawn while samples are read."""
    replace(torch, "manual_seed", lambda original: _observed_seed(recorder, original, "torch"))
    replace(random, "seed", lambda original: _observed_seed(recorder, original, "random"))
    replace(numpy.random, "seed", lambda original: _observed_seed(recorder, original, "numpy"))
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        replace(fetcher, "fetch", lambda original: _observed_fetch(recorder, original))


def _observed_seed(recorder: Recorder, original: Callable[..., Any], generator: str) -> Callable[..., Any]:
    def seed(value: Any = None, *more: Any, **named: Any) -> Any:
        if isinstance(value, int) and not recorder.looking and get_worker_info() is None:
            own = recorder.called_by_own()
            recorder.write(Seed(generator=generator, value=value, own=own, line=recorder.line()))
        return original(value, *more, **named) if value is not None else original(*more, **named)

    return seed


def _observed_fetch(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def fetch_observed(self: Any, indices: Any) -> Any:
        count = self._doctor_fetched = getattr(self, "_doctor_fetched", -1) + 1  # a fetcher lives for one pass
        # with its first samples a stream draws its order, which processes may have to draw alike before they share it
        if count != isinstance(self, fetch._IterableDatasetFetcher):
            return original(self, indices)
        before = dict(_states(self.dataset))
        result = original(self, indices)
        worker = get_worker_info()
        number = next((n for n, loader in data.loaders.items() if loader.dataset is self.dataset), -1)
        for name, state in _states(self.dataset):
            if before.get(name) not in (None, state):
                number_of_worker = worker.id if worker is not None else -1
                recorder.write(Worker(loader=number, worker=number_of_worker, generator=name, state=before[name]))
        recorder.flush()
        return result

    return fetch_observed


def _states(dataset: Any) -> Iterator[tuple[str, str]]:
    """Yield each generator that reading a sample may draw from, and a digest of its state."""
    yield "torch", _short(torch.get_rng_state().numpy().tobytes())
    yield "random", _short(repr(random.getstate()).encode())
    yield "numpy", _short(repr(numpy.random.get_state()).encode())
    for name, generator in _held(dataset, 3):
        if isinstance(generator, torch.Generator):
            yield name, _short(generator.get_state().numpy().tobytes())
        elif isinstance(generator, random.Random):
            yield name, _short(repr(generator.getstate()).encode())
        elif isinstance(generator, numpy.random.Generator):
            yield name, _short(repr(generator.bit_generator.state).encode())
        elif isinstance(generator, numpy.random.RandomState):
            yield name, _short(repr(generator.get_state()).encode())


def _held(thing: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield generators that an object holds, directly or in its attributes."""
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        kinds = torch.Generator | random.Random | numpy.random.Generator | numpy.random.RandomState
        if isinstance(value, kinds):
            yield f"{type(thing).__name__}.{name}", value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
            yield from _held(value, depth - 1)


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=5).hexdigest()
