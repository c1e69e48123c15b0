"""Runs of several lanes at once: a lane is a search, whose runs follow one another, or one run by itself.

Small networks leave a GPU idle while the host prepares, evaluates and writes; other processes use that time. A lane
waits for its own results alone, so that a greedy search and twenty seeds can share the device.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from runs import Book, Parts, Planned, trained

Lanes = Iterator[Parts]
FIRST_GUESS_S = 25.0
"""What a run is thought to take before one has ended: it compiles."""


def single(planned: Planned) -> Parts:
    """A lane of one run."""
    yield planned


def singles(planned: Iterable[Planned]) -> Lanes:
    """A lane for each run: none waits for another."""
    return (single(each) for each in planned)


class Crew:
    """Processes that train, or this one alone.

    Args:
        book: Where results go.
        folder: Of CIFAR-10.
        processes: How many runs at once; 1 trains in this process.
        until: When all must be over, by `time.monotonic`.
        tiny: A second of each run.
    """

    def __init__(self, book: Book, folder: str, processes: int, until: float, *, tiny: bool) -> None:
        self.book, self.folder, self.processes, self.until, self.tiny = book, folder, processes, until, tiny
        self.walls: list[float] = []
        self.done, self._begin = 0, time.monotonic()
        self._pool: ProcessPoolExecutor | None = None

    def carry_out(self, lanes: Lanes, *, alone: bool = False) -> bool:
        """Run lanes, the first ones first; False if the time was up before all were done.

        A run that ends in an error which is no result is told and its lane left: the others go on, and the same command
        tries it again.

        `alone` keeps the GPU to one run at a time, in this process, so that its seconds count.
        """
        many = 1 if alone else self.processes
        active: dict[Future[dict[str, Any]], Parts] = {}
        left, late = iter(lanes), False
        while True:
            while len(active) < many and not late:
                lane = next(left, None)
                if lane is None:
                    break
                late = self._go_on(lane, None, active, alone) is False
            if not active:
                return not late
            ended, _ = wait(active, return_when=FIRST_COMPLETED)
            for future in ended:
                lane = active.pop(future)
                try:
                    row = future.result()
                except Exception as error:
                    print(f"A run is left out, which ended with {type(error).__name__}: {error!s:.500}", flush=True)
                    continue
                self._note(row, shared=many > 1)
                late = self._go_on(lane, row, active, alone) is False or late

    def _go_on(self, lane: Parts, row: Any, active: dict[Future[dict[str, Any]], Parts], alone: bool) -> bool | None:
        """Answer a lane with a row (None: begin it) until it wants something new; True: started, False: no time."""
        advance: Callable[[Any], Planned] = (lambda _: next(lane)) if row is None else lane.send
        try:
            planned = advance(row)
            while planned.called in self.book.rows:
                planned = lane.send(self.book.rows[planned.called])
        except StopIteration:
            return None
        if time.monotonic() + self._expected_s() > self.until:
            return False
        if alone or self.processes == 1:
            future: Future[dict[str, Any]] = Future()
            try:
                future.set_result(trained(planned, self.folder, tiny=self.tiny))
            except Exception as error:  # as a process hands it over
                future.set_exception(error)
        else:
            future = self._submit(planned)
        active[future] = lane
        return True

    def _expected_s(self) -> float:
        """How long the next run is thought to take: as the longer ones of the last."""
        return max(self.walls[-8:], default=0.0 if self.tiny else FIRST_GUESS_S)

    def _note(self, row: dict[str, Any], *, shared: bool) -> None:
        self.walls.append(row["wall_s"])
        self.done += 1
        self.book.add(row, shared=shared)

    def _submit(self, planned: Planned) -> Future[dict[str, Any]]:
        try:
            return self._processes().submit(trained, planned, self.folder, tiny=self.tiny)
        except BrokenProcessPool:  # one of its processes has died, and with it all others
            self._pool = None
            return self._processes().submit(trained, planned, self.folder, tiny=self.tiny)

    def _processes(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.processes, mp_context=multiprocessing.get_context("spawn"))
        return self._pool

    def close(self) -> str:
        """End the processes; return how fast it went."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        seconds = time.monotonic() - self._begin
        if not self.done:
            return "Nothing was missing."
        median = statistics.median(self.walls)
        return (
            f"{self.done} runs in {seconds:.0f} s, {60 * self.done / seconds:.1f} a minute with {self.processes} at "
            f"once; a run took {median:.1f} s (median)."
        )
