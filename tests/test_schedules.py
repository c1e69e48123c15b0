"""Schedules are right at their edges, hold beyond them, and refuse what cannot be meant."""

from __future__ import annotations

import math

import pytest

from bigstep.errors import ConfigError
from bigstep.schedules import (
    BatchPlan,
    BatchStage,
    constant,
    cosine,
    elu_blend,
    join,
    linear,
    momentum_correction,
    polynomial,
    scale_lr,
    slow_start,
    step_decay,
    table,
    warmup,
)

CURVES = {
    "linear": (linear(2.0, 0.5, 10, 30), lambda t: 2.0 - 1.5 * t),
    "warmup": (warmup(2.0, 0.5, until=30, begin=10), lambda t: 2.0 - 1.5 * t),
    "polynomial": (polynomial(2.0, 0.5, 10, 30, power=3), lambda t: 0.5 + 1.5 * (1 - t) ** 3),
    "cosine": (cosine(2.0, 0.5, 10, 30), lambda t: 0.5 + 1.5 * (1 + math.cos(math.pi * t)) / 2),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_follows_its_equation_between_its_ends_and_holds_beyond(name: str) -> None:
    schedule, equation = CURVES[name]
    for epoch in (10.0, 12.5, 17.3, 29.999):
        assert schedule(epoch) == pytest.approx(equation((epoch - 10) / 20), rel=1e-12)  # another order of roundings
    assert [schedule(-1), schedule(0), schedule(10)] == [2.0, 2.0, 2.0]
    assert [schedule(30), schedule(1000)] == [0.5, 0.5]


def test_a_decay_to_zero_never_becomes_negative_or_complex() -> None:
    for schedule in (polynomial(34, 0, 12, 90, power=1.5), cosine(1, 0, 0, 90), linear(1, 0, 0, 90)):
        for step in range(9001):
            assert schedule(step / 100) >= 0


def test_a_table_changes_exactly_at_its_epochs() -> None:
    lr = table(at=(1.5, 3), values=(1.0, 2.0, 3.0))
    assert [lr(0), lr(math.nextafter(1.5, 0)), lr(1.5), lr(math.nextafter(3, 0)), lr(3), lr(99)] == [1, 1, 2, 2, 3, 3]


def test_step_decay_multiplies_once_for_each_epoch_passed() -> None:
    lr = step_decay(1.0, at=(2, 4), factor=0.5)
    assert [lr(0), lr(2), lr(3.9), lr(4), lr(50)] == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_a_slow_start_keeps_its_proportions_in_a_shorter_run() -> None:
    for tenth in range(900):
        epoch = tenth / 10 + 0.05  # between the edges, which need not be floats
        assert slow_start(1.0, epochs=90)(epoch) == slow_start(1.0, epochs=18)(epoch / 5)


def test_joined_pieces_see_the_absolute_epoch_and_the_last_one_goes_on() -> None:
    lr = join((5, warmup(0, 1, until=5)), (10, constant(7)), (20, linear(1, 0, begin=10, until=20)))
    assert [lr(2.5), lr(5), lr(9.9), lr(10), lr(15), lr(20), lr(30)] == [0.5, 7, 7, 1, 0.5, 0, 0]
    beyond = join((1, constant(1)), (2, linear(0, 10, begin=0, until=10)))
    assert beyond(8) == 8


def test_scaling_rules() -> None:
    assert scale_lr(0.1, 1024) == pytest.approx(0.4)
    assert scale_lr(0.1, 1024, rule="sqrt") == pytest.approx(0.2)
    assert scale_lr(29.0, 55296, rule="none") == 29.0
    assert scale_lr(0.4, 128, base_batch=512) == pytest.approx(0.1)


def test_the_blend_rises_smoothly_and_stays_within_zero_and_one() -> None:
    values = [elu_blend(step / 100) for step in range(2001)]
    assert all(0 < value <= 1 for value in values)
    assert all(later >= earlier for earlier, later in zip(values, values[1:], strict=False))
    for edge in (10.0, 12.5):  # no jump where the pieces meet
        assert elu_blend(edge - 1e-9) == pytest.approx(elu_blend(edge), abs=1e-8)
    slope_before = (elu_blend(10) - elu_blend(10 - 1e-6)) / 1e-6
    slope_after = (elu_blend(10 + 1e-6) - elu_blend(10)) / 1e-6
    assert slope_before == pytest.approx(1 / 5, rel=1e-5)  # a difference over 1e-6 epochs
    assert slope_after == pytest.approx(1 / 5, rel=1e-5)


def test_momentum_correction_makes_the_velocity_carry_the_new_rate() -> None:
    """The corrected velocity is the new rate times the average of gradients that knows no rate."""
    rates, gradients, momentum = [0.1, 0.5, 0.5, 0.05], [1.0, -2.0, 0.5, 3.0], 0.9
    velocity = average = 0.0
    for previous, lr, gradient in zip([0.0, *rates], rates, gradients, strict=False):
        velocity = momentum * momentum_correction(lr, previous) * velocity + lr * gradient
        average = momentum * average + gradient
        assert velocity == pytest.approx(lr * average, rel=1e-12)


def test_a_batch_plan_gives_the_stage_of_an_epoch() -> None:
    plan = BatchPlan((BatchStage(0, 8, 16), BatchStage(30, 16, 16), BatchStage(60, 4, 16)))
    assert [plan.at(epoch).workers for epoch in (0, 29.99, 30, 59, 60, 1000)] == [8, 8, 16, 16, 4, 4]
    assert plan.largest == BatchStage(30, 16, 16)
    assert plan.largest.batch == 256


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: linear(1, 0, begin=5, until=5),
        lambda: warmup(0, 1, until=0),
        lambda: polynomial(1, 0, 0, 1, power=0),
        lambda: table(at=(1, 1), values=(1, 2, 3)),
        lambda: table(at=(1, 2), values=(1, 2)),
        lambda: step_decay(1.0, at=(60, 30)),
        lambda: join(),
        lambda: join((5, constant(1)), (5, constant(2))),
        lambda: slow_start(1.0, epochs=0),
        lambda: elu_blend(1.0, period=0),
        lambda: scale_lr(0.1, batch=0),
        lambda: scale_lr(0.1, batch=8, rule="cubic"),
        lambda: BatchStage(0, 0, 4),
        lambda: BatchPlan(()),
        lambda: BatchPlan((BatchStage(1, 4, 4),)),
        lambda: BatchPlan((BatchStage(0, 4, 4), BatchStage(0, 8, 4))),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(mistake: object) -> None:
    with pytest.raises(ConfigError, match=r"\.$"):
        mistake()
