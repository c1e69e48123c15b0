"""Profile a few steps of a run: a trace for Perfetto and a table against bytes and FLOPs, in the run folder.

The path of the run stays as it is: nothing here draws from the run's random numbers or touches its weights.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bigstep.data.sampler import Step
from bigstep.engine.methods.base import Batches, Note, Outcome
from bigstep.engine.observers.base import Observer
from bigstep.engine.profile.groups import DATA, STEP, WARM_UP_STEPS
from bigstep.engine.profile.table import Peaks, table_of
from bigstep.engine.profile.text import profile_markdown
from bigstep.records import write_atomically
from bigstep.tables.precisions import find_precision

__all__ = ["StepProfiler", "measure_peaks"]

_COPY_BYTES = {"cuda": 2**29, "cpu": 2**26}  # well beyond the caches
_MATRIX = {"cuda": 8192, "cpu": 1024}
_SECONDS = 0.1  # for each of the two peaks


class StepProfiler(Observer):
    """Profiles `steps` steps of a run after a warm-up.

    Args:
        folder: that of the run; trace.json.gz, profile.json and profile.md are written there.
        steps: how many to profile.
        device: that of the run.
        precision: that of its matrix products, as the configuration names it.
        rehearse: if steps run as CUDA graphs, runs one forward and backward outside them, without side effects.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        device: torch.device,
        precision: str,
        *,
        rehearse: Callable[[], None] | None = None,
    ) -> None:
        self._folder, self._wanted, self._device = folder, steps, device
        self._dtype, self._rehearse = getattr(torch, find_precision(precision).products), rehearse
        self._seen = 0
        self._taken = 0
        self._done = False
        self._profile: torch.profiler.profile | None = None
        self._range: torch.profiler.record_function | None = None
        self._waited_s = 0.0

    def feed(self, batches: Batches) -> Batches:
        """Mark in the trace the time that it takes to get each batch."""
        while not self._done:
            with torch.profiler.record_function(DATA):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
        yield from batches

    def stepped(self, step: Step, outcome: Outcome, *, pausing: bool) -> Iterable[Note]:
        """Count a step; a profile ends before anything that is not a step, such as an evaluation."""
        if self._done:
            return
        started = time.perf_counter()
        self._seen += 1
        if self._profile is not None:
            self._taken += 1
            self._waited_s += outcome.exchange_s
            if pausing or self._taken == self._wanted:
                yield self._finish(started)
            else:
                self._mark()
        elif self._seen >= WARM_UP_STEPS and not pausing and outcome.steady:
            self._begin()

    def closed(self) -> Iterable[Note]:
        """End a profile that was interrupted; say so if none was taken."""
        if self._profile is not None:
            self._close_range()
            self._profile.stop()
            self._profile = None
            self._done = True
            yield Note(
                f"No profile was taken: the run was interrupted after {self._taken} of {self._wanted} steps of it."
            )
        if not self._done:
            self._done = True
            yield Note(
                f"No profile was taken: it begins after {WARM_UP_STEPS} steps of warm-up, at a step that no evaluation "
                f"or checkpoint follows, and the run ended after {self._seen}."
            )

    def _begin(self) -> None:
        self._peaks = measure_peaks(self._device, self._dtype)
        self._profile = self._new_profile()
        self._wait()
        self._profile.start()
        self._mark()

    def _mark(self) -> None:
        self._close_range()
        self._range = torch.profiler.record_function(STEP)
        self._range.__enter__()  # type: ignore[no-untyped-call]  # untyped in torch

    def _close_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _finish(self, started: float) -> Note:
        assert self._profile is not None
        self._wait()  # so that all that the steps have launched lies in the last range
        self._close_range()
        self._profile.stop()
        trace = _trace_of(self._profile)
        self._profile, self._done = None, True
        rehearsal = self._rehearsed(trace)
        table = table_of(
            trace["traceEvents"],
            self._peaks,
            device=self._device.type,
            waited_us=1e6 * self._waited_s,
            rehearsal=rehearsal,
        )
        profile = table.to_mapping() | {"where": _name_of(self._device)}
        write_atomically(self._folder / "trace.json.gz", gzip.compress(json.dumps(trace).encode(), 6))
        write_atomically(self._folder / "profile.json", (json.dumps(profile, indent=1) + "\n").encode())
        write_atomically(self._folder / "profile.md", profile_markdown(profile).encode())
        seconds = time.perf_counter() - started
        fewer = " (then came an evaluation or a checkpoint)" if table.steps < self._wanted else ""
        return Note(
            f"Profiled {table.steps} step{'s' if table.steps > 1 else ''}{fewer} of {table.step_us / 1e3:,.2f} ms, "
            f"which the profiler lengthens; writing it up took {seconds:.1f} s. See {self._folder / 'profile.md'}; "
            "Perfetto and chrome://tracing open trace.json.gz."
        )

    def _rehearsed(self, trace: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a rehearsal, if the steps ran as CUDA graphs, which hide the operations."""
        events = trace["traceEvents"]
        if self._rehearse is None or not any("GraphLaunch" in str(event.get("name", "")) for event in events):
            return []
        profile = self._new_profile()
        with profile:
            self._mark()
            self._rehearse()
            self._wait()
            self._close_range()
        return list(_trace_of(profile)["traceEvents"])

    def _new_profile(self) -> torch.profiler.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # acc_events: torch 2.11 warns without it that a second cycle would forget the first; here there is only one
        return torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _trace_of(profile: torch.profiler.profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        trace: dict[str, Any] = json.loads(Path(path).read_bytes())
    return trace


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} with {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Measure the device's peak rates: a copy larger than its caches, and a square matrix product in `dtype`.

    >>> measure_peaks(torch.device("cpu"), torch.float32).flops_per_s > 1e8
    True
    """
    generator = torch.Generator(device).manual_seed(0)  # its own: the run's random numbers stay as they are
    size, side = _COPY_BYTES[device.type], _MATRIX[device.type]
    with torch.no_grad():
        copied = torch.zeros(2, size, dtype=torch.uint8, device=device)
        copy_s = _best_seconds(lambda: copied[1].copy_(copied[0]), device)
        copied = torch.empty(0)  # frees the memory before more is taken
        # random numbers: a GPU multiplies zeros with less power and so faster
        matrix = torch.randn(side, side, device=device, generator=generator).to(dtype)
        product = torch.empty_like(matrix)
        product_s = _best_seconds(lambda: torch.mm(matrix, matrix, out=product), device)
    return Peaks(2 * size / copy_s, 2 * side**3 / product_s, str(dtype).removeprefix("torch."))


def _best_seconds(call: Callable[[], Any], device: torch.device) -> float:
    best, deadline, times = float("inf"), time.perf_counter() + _SECONDS, 0
    while times < 3 or (time.perf_counter() < deadline and times < 100):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if times:  # the first one warms up
            best = min(best, time.perf_counter() - started)
        times += 1
    return best
