"""The search on CIFAR-10 that is to be finished: grids grow until the best is inside, and one rule follows from it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bigstep.config.text import apply_settings


@pytest.fixture
def converged(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("cifar10", "huge"):
        monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks" / folder))
    import converged  # type: ignore[import-not-found]

    return converged


def finish(parts: Any, score: Any) -> list[Any]:
    """Carry out a part with scores in place of runs."""
    planned, asked = [], next(parts)
    try:
        while True:
            planned.append(asked)
            asked = parts.send({"accuracy": score(asked)})
    except StopIteration:
        return planned


def rate_in(planned: Any) -> float:
    return float(planned.settings[1].removeprefix("lr.base="))


def test_every_grid_grows_until_its_best_is_inside_and_no_budget_is_larger(converged: ModuleType) -> None:
    best = {16384: 16.0, 2048: 1e-9}  # times the middle: three doublings away, and out of reach

    def score(planned: Any) -> float:
        middle = converged.MIDDLES[planned.recipe]
        return -abs(rate_in(planned) / middle - best[planned.batch])

    planned = finish(converged.widen({}), score)
    rows = {f"{each.name} seed 0": {"accuracy": score(each)} for each in planned}
    for recipe, middle in converged.MIDDLES.items():
        inside, outside = (converged.found(rows, recipe, batch) for batch in (16384, 2048))
        assert sorted(inside) == pytest.approx([middle * 2.0**k for k in range(-1, 6)])
        assert converged.is_inside(inside)
        assert len(outside) == 7
        assert not converged.is_inside(outside), "the budget is spent, and the table says that it is open"
    assert all(each.holdout == 0.1 for each in planned), "no search sees the test images"


def test_the_rule_goes_through_both_searches(converged: ModuleType) -> None:
    rows = {
        f"search sony {batch} rate {rate} seed 0": {"accuracy": accuracy}
        for batch, rate, accuracy in ((2048, 1, 0.9), (2048, 2, 0.94), (16384, 8, 0.9), (16384, 4, 0.8))
    }
    rates = [converged.rate_of(rows, "sony", batch) for batch in (512, 2048, 8192, 16384, 25000)]
    assert rates == pytest.approx([1.0, 2.0, 2 ** (1 / 3) * 8 ** (2 / 3), 8.0, 8.0])
    assert converged.rate_of(rows, "lars", 512) is None
    seen = [next(parts) for parts in (converged.converged(rows),)]
    assert [(each.recipe, each.batch, each.settings[1]) for each in seen] == [("sony", 16384, "lr.base=8")]


def test_every_run_that_is_planned_can_be_configured(converged: ModuleType) -> None:
    from runs import config_of, made_tiny  # type: ignore[import-not-found]

    rows = {
        f"search {recipe} {batch} rate 1 seed 0": {"accuracy": 0.9}
        for recipe in converged.MIDDLES
        for batch in converged.SEARCHED
    }
    for part in (converged.converged, converged.ablation, converged.auto, converged.fast):
        for planned in finish(part(rows), lambda planned: 0.9):
            if planned.seed == 0:
                config = config_of(planned.recipe, planned.batch, planned.settings, planned.epochs)
                largest = max(stage.count * stage.local_batch for stage in (config.workers, *config.stages))
                grown = config.growth.most if config.plan == "auto" else 1
                assert largest * grown == pytest.approx(planned.batch, rel=0.01), planned.name
                assert made_tiny(config).recipe == config.recipe
                assert apply_settings(config, ["seed=1"]).seed == 1
