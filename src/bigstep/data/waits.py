"""Where the time of a feed goes: how long the device waited for each batch, and how long each part of the work took.

A host that runs ahead of its GPU may wait for a loader while the GPU is still busy, or get a batch at once for which
the GPU then has to wait. So waits are measured on the GPU: from the moment at which it has finished all work queued
before a batch was asked for, to the moment at which that batch is ready on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["Moment", "Spent", "Waits"]


class Spent(NamedTuple):
    """Seconds that a loader process took for a chunk."""

    read_s: float
    decode_s: float


class Moment(Protocol):
    """A point in the work of a device: a CUDA event with a clock."""

    def elapsed_time(self, later: Any, /) -> float:
        """Return milliseconds until another; negative if that one came before."""

    def query(self) -> bool:
        """Whether the device has passed it."""


class Waits:
    """Keeps the waits of a feed until they are taken.

    Args:
        device: where the batches go; nothing is measured on a CPU, where the host's own clock suffices.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handed: list[tuple[Moment, Moment]] = []
        self._copies: list[tuple[Moment, Moment]] = []
        self._asked: Moment | None = None
        self.read_s = self.decode_s = self.device_s = self.copy_s = 0.0
        self.thread: dict[str, float] = {}
        """Of the thread that has a device decode: `images`, and the seconds in which it waited for `files`, made each
        `batch` (of these, waited for the device in `decode` and launched crops in `launch`), and waited until it was
        `taken`."""

    def __len__(self) -> int:
        """Count the batches that were handed out and whose waits are not taken yet."""
        return len(self._handed)

    def asked(self) -> torch.cuda.Event | None:
        """Mark that a batch is asked for."""
        moment = self._asked = self.now()
        return moment

    def idle(self) -> bool:
        """Whether the device has finished all work queued before the last batch was asked for."""
        return self._asked is None or self._asked.query()

    def now(self) -> torch.cuda.Event | None:
        """Mark the end of the work queued on the current stream so far; None on a CPU."""
        if self.device.type != "cuda":
            return None
        moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        moment.record(torch.cuda.current_stream(self.device))
        return moment

    def handed(self, asked: Moment | None, ready: Moment | None) -> None:
        """Take note of a batch: when the device was free for it, and when it was ready."""
        if asked is not None and ready is not None:
            self._handed.append((asked, ready))

    def copied(self, begin: Moment | None, end: Moment | None) -> None:
        """Take note of a copy to the device."""
        if begin is not None and end is not None:
            self._copies.append((begin, end))

    def loaded(self, spent: Spent) -> None:
        """Take note of a chunk that a loader process brought."""
        self.read_s += spent.read_s
        self.decode_s += spent.decode_s

    def worked(self, **amounts: float) -> None:
        """Take note of the work of the thread that has a device decode."""
        for name, amount in amounts.items():
            self.thread[name] = self.thread.get(name, 0.0) + amount

    def take(self, count: int) -> list[float]:
        """Return the seconds for which the device waited for each of the first `count` batches not taken yet.

        The device must have finished these batches.
        """
        handed, self._handed = self._handed[:count], self._handed[count:]
        copies, self._copies = self._copies, []
        for begin, end in copies:
            if end.query():
                self.copy_s += begin.elapsed_time(end) / 1e3
            else:  # the copy of a batch ahead is still under way
                self._copies.append((begin, end))
        return [max(0.0, asked.elapsed_time(ready)) / 1e3 for asked, ready in handed]

    def forget(self) -> None:
        """Drop the waits that were not taken."""
        self._handed.clear()
        self._copies.clear()

    def parts(self, loaders: int) -> dict[str, float]:
        """Return the wall-clock seconds of each part, with loaders in parallel; `device` is decoding on the device."""
        several = max(loaders, 1)
        of_loaders = {"decode": self.decode_s / several, "disk": self.read_s / several, "copy": self.copy_s}
        return {**of_loaders, "device": self.device_s}
