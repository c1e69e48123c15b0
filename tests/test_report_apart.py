"""The rule by which a report tells groups of runs apart: how often it is wrong, and when it says nothing."""

from __future__ import annotations

import random

import pytest

from bigstep.report.compare import permutation_p, told_apart


def test_the_permutation_test_counts_all_splits() -> None:
    assert permutation_p([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == pytest.approx(2 / 20)
    assert permutation_p([1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]) == pytest.approx(2 / 252)
    assert permutation_p([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]) == 1.0
    assert permutation_p([1.0, 6.0], [2.0, 3.0, 4.0]) == pytest.approx(9 / 10)  # all but {2, 4}


def test_many_seeds_are_sampled_the_same_way_every_time() -> None:
    a, b = [random.Random(1).gauss(0, 1) for _ in range(20)], [random.Random(2).gauss(3, 1) for _ in range(20)]
    assert permutation_p(a, b) == permutation_p(a, b) < 0.001


@pytest.mark.parametrize("seeds", [3, 4, 5])
def test_equal_recipes_are_seldom_told_apart_and_different_ones_mostly(seeds: int) -> None:
    draw = random.Random(seeds)

    def runs(mean: float) -> list[float]:
        return [draw.gauss(mean, 1.0) for _ in range(seeds)]

    trials = 2_000
    false = sum(told_apart(runs(0), runs(0)) == "apart" for _ in range(trials)) / trials
    right = sum(told_apart(runs(5), runs(0)) == "apart" for _ in range(trials)) / trials
    assert false < 0.065  # the rule says 5 %; 3 standard errors of 2,000 trials are 1.5 points
    assert right > 0.9


def test_fewer_than_three_seeds_decide_nothing() -> None:
    assert told_apart([0.9, 0.9], [0.1, 0.1, 0.1]) == "too few"
