"""The shapes of a schedule: functions from an absolute epoch to a number, and how pieces are joined."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from bigstep.errors import require

__all__ = [
    "Schedule", "constant", "cosine", "elu_blend", "join", "linear", "polynomial", "slow_start", "step_decay", "table",
    "warmup",
]  # fmt: skip

Schedule = Callable[[float], float]
"""A function from an absolute epoch to a number."""


def constant(value: float) -> Schedule:
    """The same value at every epoch.

    >>> constant(0.1)(57.0)
    0.1
    """
    return lambda epoch: value


def linear(start: float, end: float, begin: float, until: float) -> Schedule:
    """A straight line: start + (end - start) * t, with t = (epoch - begin) / (until - begin) clamped to 0..1.

    Args:
        start: Value at `begin` and before.
        end: Value at `until` and after.
        begin: First epoch of the line.
        until: Last epoch of the line.

    Returns:
        The schedule.

    >>> lr = linear(1.0, 0.0, begin=10, until=20)
    >>> [lr(epoch) for epoch in (0, 10, 15, 20, 90)]
    [1.0, 1.0, 0.5, 0.0, 0.0]

    Reference: Yamazaki et al., Yet Another Accelerated SGD, 2019 (linear decay is one of the shapes they tried).

    Differs from the paper: its constants are not published; these are arguments.
    """
    return _curve(lambda t: t, start, end, begin, until)


def warmup(start: float, end: float, until: float, begin: float = 0.0) -> Schedule:
    """Gradual warm-up: a straight line from `start` to `end`, and `end` afterwards.

    Args:
        start: Value at `begin`.
        end: Value at `until` and after.
        until: Epoch at which the warm-up ends.
        begin: Epoch at which it starts.

    Returns:
        The schedule.

    >>> lr = warmup(0.1, 3.2, until=5)
    >>> [round(lr(epoch), 2) for epoch in (0, 2.5, 5, 20)]
    [0.1, 1.65, 3.2, 3.2]

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.2 (gradual warm-up).

    Differs from the paper: it counts in epochs, so the increment per step follows from the batch.
    """
    return linear(start, end, begin, until)


def polynomial(start: float, end: float, begin: float, until: float, power: float = 2.0) -> Schedule:
    """Polynomial decay: end + (start - end) * (1 - t)**power, with t from 0 at `begin` to 1 at `until`.

    Args:
        start: Value at `begin` and before.
        end: Value at `until` and after.
        begin: First epoch of the decay.
        until: Last epoch of the decay.
        power: Exponent; 2 in the LARS papers, 1 is a straight line.

    Returns:
        The schedule.

    >>> lr = polynomial(8.0, 0.0, begin=10, until=90)
    >>> [lr(epoch) for epoch in (10, 50, 90)]
    [8.0, 2.0, 0.0]

    Reference: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, 2017.

    Differs from the paper: in nothing; use `join` to put a warm-up before it.
    """
    require(power > 0, f"The power of a polynomial is {power}, but it must be greater than 0.")
    return _curve(lambda t: 1 - (1 - t) ** power, start, end, begin, until)


def cosine(start: float, end: float, begin: float, until: float) -> Schedule:
    """Half a cosine: end + (start - end) * (1 + cos(pi * t)) / 2, with t from 0 at `begin` to 1 at `until`.

    Args:
        start: Value at `begin` and before.
        end: Value at `until` and after.
        begin: First epoch of the decay.
        until: Last epoch of the decay.

    Returns:
        The schedule.

    >>> lr = cosine(1.0, 0.0, begin=0, until=90)
    >>> [round(lr(epoch), 3) for epoch in (0, 30, 45, 90)]
    [1.0, 0.75, 0.5, 0.0]

    Reference: Loshchilov, Hutter, SGDR, 2016, equation 5.

    Differs from the paper: one period without restarts.
    """
    return _curve(lambda t: (1 - math.cos(math.pi * t)) / 2, start, end, begin, until)


def table(at: Sequence[float], values: Sequence[float]) -> Schedule:
    """A list of values: `values[i]` holds from `at[i - 1]` up to, but not including, `at[i]`.

    Args:
        at: Epochs of the changes, rising.
        values: Values, one more than there are changes.

    Returns:
        The schedule.

    >>> lr = table(at=(40, 70), values=(0.5, 0.075, 0.01))
    >>> [lr(epoch) for epoch in (0, 39.99, 40, 89)]
    [0.5, 0.5, 0.075, 0.01]
    """
    edges, held = list(at), list(values)
    require(edges == sorted(set(edges)), f"The epochs of a table must rise, but they are {edges}.")
    require(
        len(held) == len(edges) + 1,
        f"A table needs one more value than epochs, but it has {len(held)} values for {len(edges)} epochs.",
    )
    return lambda epoch: held[bisect.bisect_right(edges, epoch)]


def step_decay(value: float, at: Sequence[float], factor: float = 0.1) -> Schedule:
    """Multiply by `factor` at each epoch of `at`: value * factor**(number of epochs of `at` that have passed).

    Args:
        value: Value before the first drop.
        at: Epochs of the drops, rising.
        factor: Factor of each drop.

    Returns:
        The schedule.

    >>> lr = step_decay(3.2, at=(30, 60, 80))
    >>> [round(lr(epoch), 4) for epoch in (29.9, 30, 60, 80)]
    [3.2, 0.32, 0.032, 0.0032]

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 5.1.

    Differs from the paper: in nothing.
    """
    return table(at, [value * factor**drops for drops in range(len(at) + 1)])


def slow_start(peak: float, epochs: float = 90.0) -> Schedule:
    """The rate that goes with the RMSprop warm-up: half of `peak` for a long time, then three steep drops.

    ::

        epochs 0-39: 0.5 * peak    40-69: 0.075 * peak    70-84: 0.01 * peak    85-89: 0.001 * peak

    Args:
        peak: The rate of the linear scaling rule, 0.1 * batch / 256; the schedule itself starts at half of it.
        epochs: Length of the run; the published edges, for 90 epochs, are scaled to it.

    Returns:
        The schedule.

    >>> lr = slow_start(12.8)  # 0.1 * 32,768 / 256
    >>> [round(lr(epoch), 4) for epoch in (0, 40, 70, 85)]
    [6.4, 0.96, 0.128, 0.0128]
    >>> round(slow_start(12.8, epochs=9)(4.0), 4)
    0.96

    Reference: Akiba, Suzuki, Fukuda, Extremely Large Minibatch SGD, 2017, section 3.2.

    Differs from the paper: for other numbers of epochs the edges are scaled in proportion; the paper has only 90.
    """
    require(epochs > 0, f"slow_start was given {epochs} epochs, but a run must be longer than 0.")
    edges = [edge * epochs / 90 for edge in (40, 70, 85)]
    return table(edges, [peak * factor for factor in (0.5, 0.075, 0.01, 0.001)])


def join(*pieces: tuple[float, Schedule]) -> Schedule:
    """Put schedules one after another: each applies until its epoch, and the last one also after its own.

    Args:
        pieces: Pairs of (epoch at which the next piece takes over, schedule). Schedules are called with the
            absolute epoch, so each piece itself must define where it begins.

    Returns:
        The schedule.

    >>> lr = join((5, warmup(0.1, 3.2, until=5)), (90, step_decay(3.2, at=(30, 60, 80))))
    >>> [round(lr(epoch), 4) for epoch in (0, 5, 30, 90)]
    [0.1, 3.2, 0.32, 0.0032]
    """
    require(len(pieces) > 0, "join was given no pieces, but it needs at least one (until, schedule).")
    ends = [until for until, _ in pieces]
    require(ends == sorted(set(ends)), f"The pieces of a schedule must follow one another, but they end at {ends}.")
    # ends[:-1]: the last piece also applies after its end
    return lambda epoch: pieces[bisect.bisect_right(ends[:-1], epoch)][1](epoch)


def elu_blend(epoch: float, center: float = 10.0, period: float = 5.0) -> float:
    """Weight of SGD (a_SGD) in the RMSprop warm-up: an exponential rise, a straight line, then 1.

    ::

        epoch < center                        0.5 * exp(2 * (epoch - center) / period)
        center <= epoch < center + period/2   0.5 + (epoch - center) / period
        otherwise                             1

    Args:
        epoch: Absolute epoch.
        center: Epoch at which SGD and RMSprop have equal weight.
        period: Length of the transition in epochs.

    Returns:
        The weight of SGD, rising from nearly 0 to 1.

    >>> [round(elu_blend(epoch), 4) for epoch in (0, 5, 10, 11, 12.5, 90)]
    [0.0092, 0.0677, 0.5, 0.7, 1.0, 1.0]

    Reference: Akiba, Suzuki, Fukuda, Extremely Large Minibatch SGD, 2017, section 3.1.

    Differs from the paper: there the line has the slope 2 / period. With it the weight would climb to 1.5 and fall
    back to 1, and RMSprop's weight would turn negative on the way. The values that the text describes (1/2 at the
    center, 1 at center + period/2) and a continuous slope at the center both require 1 / period.
    """
    require(period > 0, f"The period of elu_blend is {period}, but it must be greater than 0.")
    if epoch < center:
        return 0.5 * math.exp(2 * (epoch - center) / period)
    return min(0.5 + (epoch - center) / period, 1.0)


def _curve(shape: Schedule, start: float, end: float, begin: float, until: float) -> Schedule:
    """A schedule from `start` to `end` along `shape`, which maps 0..1 to 0..1."""
    require(begin < until, f"A schedule must end after it begins, but it begins at epoch {begin} and ends at {until}.")

    def value(epoch: float) -> float:
        if epoch <= begin:
            return start
        if epoch >= until:
            return end  # exactly, since start + (end - start) may be off by a rounding
        return start + (end - start) * shape((epoch - begin) / (until - begin))

    return value
