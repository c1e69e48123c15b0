"""How long the exchange was busy, and how much of that backward could not hide; on the CPU and on CUDA streams."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Clock", "Mark", "Meter"]


class Mark(Protocol):
    """A moment, on the host or on a CUDA stream."""

    def has_passed(self) -> bool:
        """Whether the moment has come; on a CUDA stream it comes when the device reaches the mark."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds between two marks of one clock; waits until both have passed."""


class Clock:
    """Marks moments on the host, or on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"

    def mark(self) -> Mark:
        """Mark the present moment."""
        return _DeviceMark(_record_event()) if self._on_device else _HostMark(time.perf_counter())


class Meter:
    """Adds up the time during which something was under way, over intervals that may overlap.

    Intervals start and end in the order in which they are added, as exchanges of buckets do. Those that have ended are
    added up at once, so that only those still under way are kept, however long the run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Mark, Mark]] = deque()
        self._total = 0.0
        self._until: Mark | None = None

    def add(self, start: Mark, end: Mark) -> None:
        """Count the time from `start` to `end`."""
        with self._lock:
            self._waiting.append((start, end))
            while self._waiting and all(mark.has_passed() for mark in self._waiting[0]):
                self._fold()

    @property
    def seconds(self) -> float:
        """The length of the union of all intervals so far."""
        with self._lock:
            while self._waiting:
                self._fold()
            return self._total

    def _fold(self) -> None:
        """Add the part of the oldest interval that lies beyond the end of those before it."""
        start, end = self._waiting.popleft()
        length = end.seconds_since(start)
        beyond = length if self._until is None else min(length, end.seconds_since(self._until))
        if beyond > 0:
            self._total += beyond
            self._until = end


@dataclass(frozen=True)
class _HostMark:
    at: float

    def has_passed(self) -> bool:
        return True

    def seconds_since(self, earlier: _HostMark) -> float:
        return self.at - earlier.at


@dataclass(frozen=True)
class _DeviceMark:
    event: torch.cuda.Event

    def has_passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch's

    def seconds_since(self, earlier: _DeviceMark) -> float:
        for event in (earlier.event, self.event):  # on two streams either may pass first
            event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's, without annotations
    event.record()
    return event
