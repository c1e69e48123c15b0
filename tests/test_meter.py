"""What rows say of time, on a GPU that is simulated by hand: it lags behind the host, or waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

from bigstep.engine import meter
from bigstep.engine.meter import Flush, Meter
from bigstep.engine.methods.base import Outcome
from bigstep.engine.ranks import Ranks
from pretended import pretended

BATCH, STEPS = 100, 60


@dataclass
class Clocks:
    """Seconds at which the host is, and at which the device will have done what it was given."""

    host: float = 0.0
    device: float = 0.0

    def perf_counter(self) -> float:
        return self.host


@dataclass
class Event:
    clocks: Clocks
    at: float = 0.0

    def record(self) -> None:
        self.at = max(self.clocks.device, self.clocks.host)

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)

    def synchronize(self) -> None:
        self.clocks.host = max(self.clocks.host, self.at)

    def query(self) -> bool:
        return self.clocks.host >= self.at


@dataclass
class Course:
    """A run: what a step takes the host and the device, what an observer takes the host beside each."""

    launch_s: float
    step_s: float
    observer_s: float = 0.0
    reads: bool = False
    """Whether the observer reads the loss of each step, which it waits for."""
    every: int = 0
    """Steps between evaluations of five seconds; 0 for none."""
    flushes: list[Flush] = field(default_factory=list)

    def run(self) -> float:
        """Take the steps; return what they took in all, without evaluations."""
        clocks, evaluations_s = Clocks(), 0.0
        with pretended(), mock.patch.object(meter, "time", clocks):
            device = torch.device("cuda", 0)
            with mock.patch.object(torch.cuda, "Event", side_effect=lambda **_: Event(clocks)):
                told, loss = Meter(Ranks(device=device)), torch.zeros((), dtype=torch.float64, device=device)
                for number in range(1, STEPS + 1):
                    told.begin()
                    clocks.host += self.launch_s
                    clocks.device = max(clocks.device, clocks.host) + self.step_s
                    told.add(mock.Mock(), Outcome(loss), step=number, batch=BATCH)
                    with told.pause():
                        clocks.host = max(clocks.host, clocks.device if self.reads else 0.0) + self.observer_s
                    pausing = number == STEPS or (self.every > 0 and number % self.every == 0)
                    if told.due or pausing:
                        self.flushes.append(told.flush([], whole=pausing, final=number == STEPS))
                    if pausing:
                        with told.pause():
                            clocks.host += 5.0
                            evaluations_s += 5.0
        return clocks.host - evaluations_s


def rates_of(course: Course) -> list[float]:
    """The images/s of all flushes but the first, which has nothing to run ahead of."""
    return [flush.rows[0]["images_per_s"] for flush in course.flushes[1:]]


@pytest.mark.parametrize("every", [0, 21, 25])
@pytest.mark.parametrize(("launch_s", "step_s"), [(0.001, 0.01), (0.01, 0.001), (0.001, 0.3)], ids=str)
def test_the_times_of_all_flushes_are_that_of_the_run(launch_s: float, step_s: float, every: int) -> None:
    course = Course(launch_s, step_s, every=every)
    whole_s = course.run()
    assert [row["step"] for flush in course.flushes for row in flush.rows] == list(range(1, STEPS + 1))
    assert sum(flush.elapsed_s for flush in course.flushes) == pytest.approx(whole_s)
    # a step behind an evaluation has nothing to hide its launch behind
    assert rates_of(course) == pytest.approx([BATCH / max(launch_s, step_s)] * len(rates_of(course)), rel=0.06)


def test_what_the_host_does_beside_a_gpu_that_is_busy_takes_no_time_from_its_steps() -> None:
    course = Course(launch_s=0.001, step_s=0.01, observer_s=0.005)
    whole_s = course.run()
    assert sum(flush.elapsed_s for flush in course.flushes) == pytest.approx(whole_s, rel=0.02)
    assert rates_of(course) == pytest.approx([10_000] * len(rates_of(course)), rel=0.1)


@pytest.mark.parametrize(("launch_s", "step_s", "observer_s"), [(0.01, 0.001, 0.005), (0.001, 0.01, 0.02)], ids=str)
def test_what_the_host_does_while_a_gpu_waits_for_it_is_no_time_of_steps(
    launch_s: float, step_s: float, observer_s: float
) -> None:
    course = Course(launch_s, step_s, observer_s)
    course.run()
    assert rates_of(course) == pytest.approx([BATCH / (launch_s + step_s)] * len(rates_of(course)), rel=0.1)


def test_a_step_that_an_observer_waits_for_takes_its_time() -> None:
    course = Course(launch_s=0.001, step_s=0.01, reads=True)
    whole_s = course.run()
    assert sum(flush.elapsed_s for flush in course.flushes) == pytest.approx(whole_s)
    assert rates_of(course) == pytest.approx([BATCH / 0.011] * len(rates_of(course)), rel=0.1)
