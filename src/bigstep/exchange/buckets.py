"""The size of DDP's buckets, tried out in the first steps of a run.

DDP fixes the size when it is made, so each trial makes a new DDP object around the same module; its gradients are the
same (up to the order of a sum), so trial steps train like any other step and none is wasted.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bigstep.errors import ConfigError

__all__ = ["DDP_DEFAULT_MB", "BucketTuner"]

DDP_DEFAULT_MB = 25.0
"""DDP's own default."""

# DDP rebuilds its buckets after the first step, and the second step still allocates memory for them
_UNMEASURED = 2


class BucketTuner:
    """Tries bucket sizes for a few steps each and keeps the fastest.

    The time of a step is that of the slowest rank, so all ranks make the same choice. Another size replaces DDP's
    default only if its median is faster than every measured step of the default: a gain that noise could explain does
    not count.

    Args:
        make_ddp: Makes the DDP object (with its exchange attached) for a bucket size in MB; called on every rank. The
            tuner holds the only reference to it: use `tuner.ddp` in each step.
        sizes: Megabytes to try; DDP's default is tried first in any case.
        steps: Measured steps for each size, after two that are not measured.

    Example of a loop:
        `tuner = BucketTuner(make_ddp)`, then in each step `tuner.ddp(inputs)` ... and at its end `tuner.step_ended()`.
        Once `tuner.done`, `tuner.bucket_mb` is the choice and `tuner.table` what was seen, for the run's records.
    """

    def __init__(
        self,
        make_ddp: Callable[[float], DistributedDataParallel],
        sizes: Sequence[float] = (1.0, 4.0, 10.0, 50.0),
        steps: int = 4,
    ) -> None:
        if not sizes or min(sizes) <= 0 or steps < 1:
            raise ConfigError(f"Bucket sizes must be positive, and steps at least 1 (got {list(sizes)} and {steps}).")
        self._make_ddp = make_ddp
        self._steps = steps
        self._waiting = [size for size in sizes if size != DDP_DEFAULT_MB]
        self._laps: list[float] = []
        self._seen: dict[float, list[float]] = {}
        self.done = False
        """Whether the choice has been made."""
        self.bucket_mb = DDP_DEFAULT_MB
        """The size in use; once done, the one chosen."""
        self.ddp: DistributedDataParallel = make_ddp(DDP_DEFAULT_MB)
        """The DDP object to use in the next step."""
        self._lap_start = time.perf_counter()

    @property
    def table(self) -> list[dict[str, Any]]:
        """For each size tried: bucket_mb, n, and the median, smallest and largest step in seconds (slowest rank)."""
        return [
            {"bucket_mb": size, "n": len(laps), "median_s": statistics.median(laps),
             "min_s": min(laps), "max_s": max(laps)}
            for size, laps in self._seen.items()
        ]  # fmt: skip

    def step_ended(self) -> None:
        """Call after each step of training, on every rank; may put another DDP object in `ddp`."""
        if self.done:
            return
        device = next(self.ddp.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        self._laps.append(now - self._lap_start)
        if len(self._laps) == _UNMEASURED + self._steps:
            self._seen[self.bucket_mb] = self._slowest(self._laps[_UNMEASURED:], device)
            self._laps = []
            if self._waiting:
                self._use(self._waiting.pop(0))
            else:
                self.done = True
                self._use(self._choice())
        self._lap_start = time.perf_counter()

    def _choice(self) -> float:
        medians = {size: statistics.median(laps) for size, laps in self._seen.items()}
        best = min(medians, key=lambda size: medians[size])
        return best if medians[best] < min(self._seen[DDP_DEFAULT_MB]) else DDP_DEFAULT_MB

    def _slowest(self, laps: list[float], device: torch.device) -> list[float]:
        """Hazard: a collective; every rank must call it after the same step."""
        times = torch.tensor(laps, dtype=torch.float64, device=device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.ddp.process_group)
        return [float(value) for value in times.tolist()]

    def _use(self, size: float) -> None:
        if size == self.bucket_mb:
            return
        self.bucket_mb = size
        old = weakref.ref(self.ddp)
        del self.ddp
        gc.collect()  # DDP is in reference cycles, and only when it is freed do its hooks leave the parameters
        if old() is not None:  # two at once would both exchange every gradient
            raise ConfigError(
                "The DDP object that the tuner replaces is still held elsewhere: use tuner.ddp in each step, and "
                "keep no reference to it."
            )
        self.ddp = self._make_ddp(size)
