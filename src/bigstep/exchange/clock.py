"""How long the exchange was busy, and how much of that backward could not hide; on the CPU and on CUDA streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

__all__ = ["Clock", "Meter"]

# A mark is a moment; two of them give seconds. CUDA's are events, whose times are known once the device got there.
Mark = Callable[[], float]


class Clock:
    """Marks moments on the host, or on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._origin = _event() if device.type == "cuda" else None

    def mark(self) -> Mark:
        """This moment; call the result for its time in seconds (a CUDA mark waits until the device has reached it)."""
        if self._origin is None:
            now = time.perf_counter()
            return lambda: now
        origin, event = self._origin, _event()

        def seconds() -> float:
            event.synchronize()
            return float(origin.elapsed_time(event)) / 1e3

        return seconds


class Meter:
    """Adds up the time during which something was under way, over many overlapping intervals."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: list[tuple[Mark, Mark]] = []
        self._total = 0.0
        self._until = float("-inf")

    def add(self, start: Mark, end: Mark) -> None:
        """Something was under way from `start` to `end`."""
        with self._lock:
            self._intervals.append((start, end))

    @property
    def seconds(self) -> float:
        """The length of the union of all intervals so far."""
        with self._lock:
            for start, end in sorted((start(), end()) for start, end in self._intervals):
                self._total += max(0.0, end - max(start, self._until))
                self._until = max(self._until, end)
            self._intervals.clear()
            return self._total


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's, without annotations
    event.record()
    return event
