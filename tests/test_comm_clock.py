"""How the exchange counts its time: the union of overlapping intervals, in bounded memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from bigstep.exchange.clock import Clock, Meter


@dataclass
class Device:
    """A clock that only the test moves."""

    now: float = 0.0
    asked: list[float] = field(default_factory=list)


@dataclass
class Moment:
    at: float
    device: Device

    def has_passed(self) -> bool:
        return self.at <= self.device.now

    def seconds_since(self, earlier: Moment) -> float:
        self.device.asked.append(self.at)
        return self.at - earlier.at


def union(intervals: list[tuple[float, float]]) -> float:
    """By a sweep over both ends, unlike the meter."""
    edges = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    total, open_now, since = 0.0, 0, 0.0
    for at, change in edges:
        if open_now:
            total += at - since
        open_now, since = open_now + change, at
    return total


@pytest.mark.parametrize("seed", range(5))
def test_overlapping_buckets_count_once(seed: int) -> None:
    draw = random.Random(seed)
    starts = sorted(draw.uniform(0, 50) for _ in range(60))
    ends: list[float] = []
    for start in starts:  # buckets end in the order in which they began
        ends.append(max([start + draw.uniform(0, 4), *ends[-1:]]))
    intervals = list(zip(starts, ends, strict=True))
    meter, device = Meter(), Device()
    for start, end in intervals:
        device.now = draw.uniform(start, end + 5)
        meter.add(Moment(start, device), Moment(end, device))
    assert meter.seconds == pytest.approx(union(intervals))


def test_intervals_that_have_ended_are_not_kept() -> None:
    """A device that is three buckets behind keeps three intervals, after any number of steps."""
    meter, device = Meter(), Device()
    for step in range(10_000):
        device.now = step - 3
        meter.add(Moment(step - 0.5, device), Moment(step, device))
        assert len(meter._waiting) <= 3
    assert all(at <= step for step, at in enumerate(device.asked, 1)), "nothing waits for the device"
    assert meter.seconds == pytest.approx(10_000 * 0.5)


def test_an_interval_that_began_on_another_stream_waits_for_its_beginning() -> None:
    """The end of an exchange may pass before its stream's neighbour comes to the beginning: nothing was exposed."""
    meter, device = Meter(), Device(now=5.0)
    meter.add(Moment(6.0, device), Moment(5.0, device))
    assert not device.asked, "an event that has not come has no time"
    device.now = 7.0
    meter.add(Moment(6.0, device), Moment(6.5, device))
    assert meter.seconds == pytest.approx(0.5)


def test_the_clock_of_the_host_keeps_nothing() -> None:
    meter, clock = Meter(), Clock(torch.device("cpu"))
    for _ in range(1000):
        meter.add(clock.mark(), clock.mark())
    assert len(meter._waiting) == 0
    assert 0 < meter.seconds < 10
