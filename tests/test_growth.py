"""plan: auto: the batch follows the noise scale, the same on any number of ranks, and a resumed run decides alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigstep.config import (
    AsynchronousConfig,
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    GrowthConfig,
    IslandsConfig,
    LrConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    Stage,
    WorkersConfig,
)
from bigstep.config.edit import finish_on_one, make_exact, scale_workers, stretch
from bigstep.config.text import apply_settings, config_from_yaml, config_to_yaml
from bigstep.data.sampler import Position, Sampler, Step
from bigstep.engine.growth import Growth
from bigstep.engine.methods.forwards import Forwards
from bigstep.errors import ConfigError
from bigstep.records import read_run
from bigstep.report.outcome import outcome_of
from bigstep.schedules import BatchPlan, BatchStage
from bigstep.train import fit
from worlds import World

ORDER = RunConfig(
    recipe="test",
    model="mlp",
    data=DataConfig(holdout=0.95, loaders=0),  # 600 images
    workers=WorkersConfig(count=4, local_batch=4),
    plan="auto",
    growth=GrowthConfig(most=8, scales=1.0, every=0.5, measured=3),
    epochs=4,
    lr=LrConfig(base=0.02, scaling="sqrt", base_batch=16, follow_plan=True),
    optimizer=OptimizerConfig(name="sgd", momentum=0.9),
    checkpoint=CheckpointConfig(every=0.3),
    evaluate_every=100,
    precision="float64",
)


def train(order: RunConfig, folder: str, steps: int | None = None, resume: bool = False) -> dict[str, Any]:
    result = fit(order, out=folder, device="cpu", max_steps=steps, resume=resume)
    rows = read_run(Path(folder)).train if Path(folder, "run.json").exists() else []
    return {
        "sha": result.weights_sha256,
        "plan": result.facts.get("plan"),
        "batches": [row["batch"] for row in rows],
        "losses": [row["loss"] for row in rows],
    }


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run on one rank."""
    return tmp_path_factory.mktemp("growth") / "auto"


@pytest.fixture(scope="module")
def grown(auto: Path) -> dict[str, Any]:
    """The run on one rank, from beginning to end."""
    return train(ORDER, str(auto))


def test_the_batch_grows_and_the_plan_that_it_wrote_leads_along_the_same_path(
    auto: Path, grown: dict[str, Any], tmp_path: Path
) -> None:
    assert len(grown["plan"]) >= 2, "the noise of 16 images is far above 16: the batch must grow"
    assert all(stage["local_batch"] == 4 for stage in grown["plan"])
    assert [stage["count"] for stage in grown["plan"]] == [4 * 2**k for k in range(1, len(grown["plan"]) + 1)]
    assert max(grown["batches"]) <= 8 * 16
    listed = dataclasses.replace(ORDER, plan=tuple(Stage(**stage) for stage in grown["plan"]))
    fixed = train(listed, str(tmp_path / "fixed"))
    assert fixed["batches"] == grown["batches"]
    assert fixed["losses"] == pytest.approx(grown["losses"], rel=1e-12)  # other steps are measured, none is changed
    outcome = outcome_of(read_run(auto))
    assert outcome.batches.startswith("16 → 32 → "), "the report tells the stages that were decided"


def test_ranks_decide_alike_and_a_resumed_run_decides_again_what_it_had_decided(
    grown: dict[str, Any], world: Callable[[int], World], tmp_path: Path
) -> None:
    alone = grown
    for ranks in (2, 3):
        together = world(ranks).run(train, ORDER, str(tmp_path / str(ranks)))
        assert all(each["plan"] == alone["plan"] for each in together)
        assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-9)  # sums in another order
    first = 19  # half an epoch of 600 images in batches of 16: the first decision is due behind it
    for stop in (first, 25, 60):
        folder = str(tmp_path / f"parts {stop}")
        train(ORDER, folder, stop)
        parts = train(ORDER, folder, resume=True)
        assert (parts["sha"], parts["plan"]) == (alone["sha"], alone["plan"])
        assert parts["losses"] == alone["losses"]
    world(3).run(train, ORDER, str(tmp_path / "three"), 40)
    moved = train(ORDER, str(tmp_path / "three"), resume=True)
    assert moved["plan"] == alone["plan"], "the decisions of three ranks are those of one"


def measured(signal: float, noise: float) -> tuple[float, float, float, float]:
    return signal + noise / 32, 32, signal + noise / 256, 256


@pytest.mark.parametrize(
    "scale, count, samples, grows",
    [(600.0, 3, 10_000, True), (600.0, 2, 10_000, False), (500.0, 3, 10_000, False), (600.0, 3, 500, False)],
)
def test_the_batch_is_doubled_up_to_the_noise_scale_once_it_is_known(
    scale: float, count: int, samples: int, grows: bool
) -> None:
    growth = Growth(GrowthConfig(), BatchStage(0, 8, 32), samples)
    for _ in range(count):
        growth.scale.update(*measured(1.0, scale))
    assert (growth.decide(1.0) is not None) == grows
    assert growth.at(1.0).batch == (512 if grows else 256)
    assert growth.at(0.99).batch == 256


def test_a_gradient_that_noise_hides_lets_the_batch_grow_up_to_its_bound() -> None:
    growth = Growth(GrowthConfig(most=4), BatchStage(0, 8, 32), 10_000)
    for _ in range(3):
        growth.scale.update(*measured(-0.01, 100.0))
    assert [growth.decide(epoch) is not None for epoch in (1.0, 2.0, 3.0)] == [True, True, False]
    assert growth.at(9).batch == 1024
    other = Growth(GrowthConfig(most=4), BatchStage(0, 8, 32), 10_000)
    other.load_state_dict(growth.state_dict())
    assert other.stages == growth.stages
    assert other.scale.state_dict() == growth.scale.state_dict()


def test_a_measured_step_has_the_first_worker_apart_wherever_workers_are_joined() -> None:
    sampler = Sampler(64, 0, BatchPlan((BatchStage(0, 8, 4),)))
    step = Step(Position(), 32, 8, 4)
    forwards = Forwards(sampler, lambda step: range(8), max_samples=1000, measured=5)
    assert [(f.first_worker, f.workers) for f in forwards.of(step, cut=True)] == [(0, 1), (1, 7)]
    assert [(f.first_worker, f.workers) for f in forwards.of(step)] == [(0, 8)]
    second = dataclasses.replace(forwards, hosted=lambda step: range(4, 8))
    assert [(f.first_worker, f.workers) for f in second.of(step, cut=True)] == [(4, 4)]


@pytest.mark.parametrize(
    "changes",
    [
        {"islands": IslandsConfig(count=2)},
        {"islands": IslandsConfig(outer=OuterConfig(name="sgd", lr=0.5))},
        {"exchange": ExchangeConfig(collective="gather", codec="onebit")},
        {"exchange": ExchangeConfig(double_buffer=True)},
        {"asynchronous": AsynchronousConfig(method="hogwild")},
        {"workers": WorkersConfig(count=1, local_batch=16)},
        {"optimizer": OptimizerConfig(adagrad="before")},
        {"data": DataConfig(drop_last=True)},
        {"data": DataConfig(drop_last=True), "growth": GrowthConfig(every=float("inf"))},
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^(plan is auto, but with|growth.every is .*, but with data.drop_last)"):
        dataclasses.replace(ORDER, **changes)
    for change in (make_exact, lambda order: finish_on_one(order, 1)):
        with pytest.raises(ConfigError, match="plan is auto"):
            change(ORDER)


def test_auto_survives_text_and_changes_of_workers_and_epochs() -> None:
    assert config_from_yaml(config_to_yaml(ORDER), "run.yaml") == ORDER
    assert apply_settings(ORDER, ["workers.count=8"]).plan == "auto"
    assert stretch(scale_workers(ORDER, count=2), 8).plan == "auto"
    assert stretch(ORDER, 1).growth.every == 0.125, "a shorter run decides as often"
    assert apply_settings(stretch(ORDER, 1), ["growth.every=0.5"]).growth.every == 0.5
    with pytest.raises(ConfigError, match="plan takes auto or a list"):
        apply_settings(ORDER, ["plan=atuo"])


def test_the_command_line_counts_the_workers_that_a_run_begins_with() -> None:
    from bigstep.cli.resolve import require_capacity
    from bigstep.engine.job import Job

    require_capacity(2, Job(config=ORDER, folder=Path("run")))
    with pytest.raises(ConfigError, match="--procs is 5, but the run has 4 workers"):
        require_capacity(5, Job(config=ORDER, folder=Path("run")))
