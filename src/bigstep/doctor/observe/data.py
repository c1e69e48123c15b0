"""Data loaders: which samples a rank reads, in which order, and how long it waits for them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler
from torch.utils.data import dataloader as loading

from bigstep.doctor.facts import Batch, Loader, Pass
from bigstep.doctor.observe.clock import now
from bigstep.doctor.observe.digest import biggest, rows
from bigstep.doctor.observe.recorder import Recorder, replace

__all__ = ["install", "loaders"]

loaders: dict[int, DataLoader[Any]] = {}
"""Every loader that was iterated, by its number in the facts."""
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_passes: dict[int, int] = {}
KEPT = 64
"""Indices of a batch that a fact keeps, at most."""
last_loader = -1
"""The number of the loader that gave the latest batch."""


def install(recorder: Recorder) -> None:
    """Observe `DataLoader`."""
    replace(DataLoader, "__iter__", lambda original: _observed_iter(recorder, original))
    base = loading._BaseDataLoaderIter
    replace(base, "__next__", lambda original: _observed_next(recorder, original))
    replace(base, "_next_index", _observed_index)
    replace(base, "_reset", _observed_reset)
    # the subclass has its own method, which calls the base's
    replace(loading._MultiProcessingDataLoaderIter, "_reset", _observed_reset)


def _observed_iter(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def __iter__(self: DataLoader[Any]) -> Any:  # noqa: N807
        number = _numbers.get(self)
        line = recorder.line()
        if number is None:
            number = _numbers[self] = len(_numbers)
            loaders[number] = self
            recorder.write(_describe(self, number, line))
        began = now()
        iterator = original(self)
        recorder.tally.input_s += now() - began
        count = _passes[number] = _passes.get(number, -1) + 1
        epoch = next((int(s.epoch) for s in _samplers(self) if hasattr(s, "epoch")), -1)
        recorder.write(Pass(loader=number, number=count, sampler_epoch=epoch, line=line))
        iterator._doctor_pass = (number, count)
        iterator._doctor_given = 0
        return iterator

    return __iter__


def _observed_next(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807
        global last_loader
        if recorder.enough:
            recorder.stop()
        if 0 < recorder.settings.short <= getattr(self, "_doctor_given", 0):
            raise StopIteration
        began = now()
        data = original(self)
        wait_s = now() - began
        recorder.tally.input_s += wait_s
        number, count = getattr(self, "_doctor_pass", (-1, 0))
        waiting = getattr(self, "_doctor_indices", None)
        indices = waiting.popleft() if waiting else ()
        if number >= 0:
            last_loader = number
            self._doctor_given += 1
            if not recorder.settings.only_time:
                look = recorder.detailed or self._doctor_given <= 2
                with recorder.quietly():
                    content = rows(biggest(data)) if look else ()
                    base = base_indices(loaders[number].dataset, indices[:KEPT])
                recorder.write(Batch(loader=number, number=count, indices=base, rows=content, wait_s=wait_s))
        return data

    return __next__


def _observed_index(original: Callable[..., Any]) -> Callable[..., Any]:
    def _next_index(self: Any) -> Any:
        index = original(self)
        if not hasattr(self, "_doctor_indices"):
            self._doctor_indices = deque()
        batch = index if isinstance(index, list | tuple) else [index]
        self._doctor_indices.append([i for i in batch if isinstance(i, int)])
        return index

    return _next_index


def _observed_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    def _reset(self: Any, *arguments: Any, **named: Any) -> Any:
        self._doctor_indices = deque()  # indices drawn ahead belong to the previous pass
        return original(self, *arguments, **named)

    return _reset


def base_indices(dataset: Any, indices: Sequence[int]) -> tuple[int, ...]:
    """Follow indices through `Subset` and its like to the data set below, where ranks can be compared."""
    found = list(indices)
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        try:
            found = [int(dataset.indices[i]) for i in found]
        except (TypeError, IndexError, KeyError, ValueError):
            break
        dataset = dataset.dataset
    return tuple(int(i) for i in found)


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers of a loader, from the outside in."""
    found: list[Any] = []
    waiting: list[Any] = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is None or any(sampler is each for each in found):
            continue
        found.append(sampler)
        waiting += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found


def _length(value: Any) -> int:
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return -1


def _describe(loader: DataLoader[Any], number: int, line: str) -> Loader:
    samplers = [s for s in _samplers(loader) if isinstance(s, Sampler)]
    single = next((s for s in samplers if not hasattr(s, "batch_size")), None)
    batch = loader.batch_size or next((s.batch_size for s in samplers if hasattr(s, "batch_size")), 1)
    iterable = isinstance(loader.dataset, IterableDataset)
    samples = -1 if iterable else _length(loader.dataset)
    drawn = -1
    if not iterable:
        plain = single is not None and type(loader.batch_sampler) is torch.utils.data.BatchSampler
        drawn = _length(single) if plain else _length(loader.batch_sampler) * batch
    padded = 0
    if isinstance(single, DistributedSampler):
        padded = max(0, single.total_size - samples)
    return Loader(
        loader=number,
        dataset=type(loader.dataset).__name__,
        samples=samples,
        drawn=drawn,
        batch=batch if isinstance(batch, int) else -1,
        workers=loader.num_workers,
        sampler=type(single).__name__ if single is not None else "",
        shuffle=isinstance(single, RandomSampler) or bool(getattr(single, "shuffle", False)),
        replacement=bool(getattr(single, "replacement", False)),
        iterable=iterable,
        padded=padded,
        drop_last=bool(loader.drop_last),
        seed=int(getattr(single, "seed", -1)) if isinstance(getattr(single, "seed", -1), int) else -1,
        line=line,
    )
