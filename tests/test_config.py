"""Configurations as text: they round-trip, and what cannot be run is refused with a useful sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bigstep import recipes
from bigstep.asynchronous.limits import require_runnable
from bigstep.config import RunConfig
from bigstep.config.edit import decides_path, find_change, same_experiment, scale_batch, scale_workers, stretch
from bigstep.config.text import apply_settings, config_from_mapping, config_from_yaml, config_to_mapping, config_to_yaml
from bigstep.errors import ConfigError
from bigstep.tables.optimizers import RMSpropWarmupSettings

BASE = {"workers": {"count": 8, "local_batch": 32}, "epochs": 2, "lr": {"base": 0.1}}


def base() -> RunConfig:
    return config_from_mapping(BASE)


def test_yaml_round_trip_keeps_every_field_and_carries_its_sentence() -> None:
    config = apply_settings(
        base(),
        [
            "plan=[{epoch: 1, count: 8, local_batch: 64}]",
            "lr.schedule=[{shape: warmup, until: 1, start: base}, {shape: polynomial, until: 2, end: 0}]",
            "exchange.grid=[2, 4]",
            "data.sizes=[{epoch: 0, image_size: 20}]",
        ],
    )
    text = config_to_yaml(config)
    assert config_from_yaml(text, "text") == config
    assert "# Samples of one worker in one step." in text


def test_mapping_is_json_ready() -> None:
    assert config_to_mapping(base())["exchange"]["grid"] == "auto"
    assert config_to_mapping(base())["plan"] == []


def test_exponents_without_a_dot_are_numbers() -> None:
    assert apply_settings(base(), ["optimizer.weight_decay=5e-5"]).optimizer.weight_decay == 5e-5


def test_a_whole_number_may_be_written_with_a_point() -> None:
    config = apply_settings(base(), ["evaluate_views=2.0", "workers.count=4.0"])
    assert [repr(value) for value in (config.evaluate_views, config.workers.count)] == ["2", "4"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lr.bas=1", "did you mean 'lr.base'"),
        ("worker.count=1", "did you mean 'workers"),
        ("lr.base=fast", "lr.base takes a number"),
        ("lr.base=0", "greater than 0"),
        ("lr.base=-1", "greater than 0"),
        ("lr.base=.nan", "lr.base takes a number"),
        ("lr.base=.inf", "lr.base takes a number"),
        ("lr.scaling=log", "allowed are linear, none, sqrt"),
        ("lr.base.x=1", "has no fields"),
        ("lr=1", "set lr.base, or another of its fields"),
        ("optimizer=adamw", "set optimizer.name, or another of its fields"),
        ("batch=64", "did you mean 'workers.local_batch' or"),
        ("momentum=0.5", "did you mean 'optimizer.momentum' or 'norm.momentum'"),
        ("codec=fp16", "did you mean 'exchange.codec' or 'islands.codec'"),
        ("lr.base", "FIELD=VALUE"),
        ("=3", "FIELD=VALUE"),
        ("workers.count=0", "greater than 0"),
        ("workers.count=2.5", "a whole number"),
        ("workers.count=true", "a whole number"),
        ("workers.local_batch=-3", "greater than 0"),
        ("optimizer.name=adam", "optimizer.name is 'adam'"),
        ("optimizer.momentum=1", "less than 1"),
        ("optimizer.weight_decay=-1", "must not be negative"),
        ("loss.label_smoothing=1", "less than 1"),
        ("norm.statistics=none", "allowed are last_batch, moving"),
        ("norm.zero_gamma=maybe", "true or false"),
        ("exchange.codec=onebit", "collective=gather"),
        ("exchange.collective=gather", "codec=onebit"),
        ("exchange.grid=[2]", "two positive numbers"),
        ("exchange.grid=big", "auto or a list"),
        ("exchange.bucket_mb=0", "greater than 0"),
        ("precision=fp8", "precision is 'fp8'"),
        ("seed=-1", "between 0 and"),
        ("epochs=0", "greater than 0"),
        ("plan=[{epoch: 2, count: 1, local_batch: 1}, {epoch: 1, count: 1, local_batch: 1}]", "rising epochs"),
        ("plan=[{epoch: 2, count: 1}]", "lacks the field 'local_batch'"),
        ("plan=3", "plan takes auto or a list (got 3)"),
        ("lr.schedule=[{shape: wave, until: 3}]", "lr.schedule.shape is 'wave'"),
        ("lr.schedule=[{shape: table, until: 3, at: [1], values: [1]}]", "one more value"),
        ("lr.schedule=[{shape: constant, until: 3}, {shape: constant, until: 2}]", "but they end at"),
        ("lr.schedule=[{shape: linear, until: 3, end: -0.1}]", "lr.schedule.end is -0.1, but it must not be negative"),
        ("lr.schedule=[{shape: step, until: 3, at: [1], factor: -0.1}]", "must not be negative"),
        ("lr.schedule=[{shape: table, until: 3, at: [1], values: [1, -1]}]", "must hold no negative number"),
        ("lr.base=[", "not valid YAML"),
        ("lr.warmup_batch=-1", "must not be negative"),
        ("checkpoint.keep=0", "greater than 0"),
        ("data.holdout=1.5", "less than 1"),
        ("data.sizes=[{epoch: 1, image_size: 0}]", "greater than 0"),
        ("exchange.bucket_mb=-1", "exchange.bucket_mb is -1.0, but it must be greater than 0"),
        ("exchange.codec=fp61", "did you mean 'fp16'"),
        ("asynchronous.method=hogwil", "did you mean 'hogwild'"),
        ("islands.count=3", "8 workers cannot be shared evenly by 3 islands"),
        ("islands.every=0", "greater than 0"),
        ("islands={count: 2, every: 4, overlap: 4}", "must have arrived before the next"),
        ("islands={every: 2, overlap: 3, outer: {name: nesterov}}", "must have arrived before the next"),
        ("islands.outer={lr: 0.5}", "takes the mean as it is"),
        ("islands.codec=zip", "islands.codec is 'zip'"),
        ("islands.outer.nam=sgd", "did you mean 'islands.outer.name'"),
        ("optimizer={name: adamw, betas: [0.9]}", "two numbers"),
        ("optimizer={name: muon, rest: adam}", "did you mean 'adamw'"),
        ("lr.groups=[{names: '*', factor: 0}]", "greater than 0"),
        ("evaluate_views=true", "evaluate_views is True, but allowed are 1, 2, 6"),
        ("evaluate_views=3", "evaluate_views is 3, but allowed are 1, 2, 6"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(setting: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        apply_settings(base(), [setting])
    sentence = str(refusal.value)
    assert words in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("text", ["", "3", "[1]", "a: [", "!!python/object/apply:os.system ['true']", "epochs: 1"])
def test_wrong_yaml_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        config_from_yaml(text, "run.yaml")


def test_a_plan_follows_the_workers_unless_it_is_set_too() -> None:
    planned = apply_settings(base(), ["plan=[{epoch: 1, count: 16, local_batch: 64}]"])
    first = planned.workers
    grown = apply_settings(planned, [f"workers.count={4 * first.count}"])
    assert [(stage.count, stage.local_batch) for stage in grown.plan] == [(64, 64)]
    halved = apply_settings(planned, [f"workers.local_batch={first.local_batch // 2}"])
    assert [(stage.count, stage.local_batch) for stage in halved.plan] == [(16, 32)]
    own = apply_settings(planned, ["workers.count=2", "plan=[{epoch: 1, count: 5, local_batch: 7}]"])
    assert [(stage.count, stage.local_batch) for stage in own.plan] == [(5, 7)]


def everything_in_epochs() -> RunConfig:
    return config_from_mapping(
        {
            **BASE,
            "epochs": 8,
            "plan": [{"epoch": 4, "count": 8, "local_batch": 64}],
            "optimizer": {"name": "rmsprop_warmup", "blend_center": 2, "blend_period": 1},
            "lr": {
                "base": 0.1,
                "schedule": [
                    {"shape": "warmup", "until": 1, "start": 0},
                    {"shape": "step", "until": 8, "at": [3, 6]},
                ],
            },
            "data": {"sizes": [{"epoch": 2, "image_size": 20}]},
            "exchange": {"warmup_steps": 16},
            "islands": {"begin": 5},
            "asynchronous": {"warm_start": 0.5},
        }
    )


def test_a_stretched_run_keeps_the_place_of_all_that_counts_in_epochs() -> None:
    config = stretch(everything_in_epochs(), 2)
    assert [piece.until for piece in config.lr.schedule] == [0.25, 2]
    assert config.lr.schedule[1].at == (0.75, 1.5)
    assert isinstance(config.optimizer, RMSpropWarmupSettings)
    assert (config.optimizer.blend_center, config.optimizer.blend_period) == (0.5, 0.25)
    assert (config.epochs, config.plan[0].epoch, config.data.sizes[0].epoch) == (2, 1, 0.5)
    assert (config.exchange.warmup_steps, config.islands.begin, config.asynchronous.warm_start) == (4, 1.25, 0.125)
    assert stretch(config, 8) == everything_in_epochs()


@pytest.mark.parametrize("epochs", [0, -1, float("inf"), float("nan")])
def test_no_run_is_stretched_to_nothing_or_for_ever(epochs: float) -> None:
    with pytest.raises(ConfigError, match="must be greater than 0"):
        stretch(base(), epochs)


def test_a_short_downpour_run_still_uses_all_its_replicas() -> None:
    short = stretch(recipes.load("downpour"), 1)
    assert 0 < short.asynchronous.warm_start < short.epochs
    serial = apply_settings(recipes.load("downpour"), ["epochs=1"])  # not stretched: the warm start fills the run
    with pytest.raises(ConfigError, match="no other replica would ever take part"):
        require_runnable(serial, cast(Any, SimpleNamespace(size=1)), resume=False)


def test_another_batch_adds_workers_and_the_rate_follows_by_the_rule_of_the_optimizer() -> None:
    lars = apply_settings(base(), ["optimizer.name=lars", "lr.scaling=none"])
    grown = scale_batch(lars, 4 * lars.batch)
    assert (grown.workers.count, grown.workers.local_batch) == (32, 32)
    assert (grown.lr.scaling, grown.lr.base_batch) == ("sqrt", lars.batch)
    sgd = apply_settings(base(), ["lr.scaling=none"])
    assert scale_batch(sgd, 512).lr.scaling == "linear"
    assert scale_batch(base(), 512).lr == base().lr  # it follows by itself
    planned = apply_settings(base(), ["plan=[{epoch: 1, count: 8, local_batch: 64}]"])
    assert scale_batch(planned, 1024, of_largest=True).plan[0].count == 16


def test_islands_share_the_workers_of_a_scaled_run_evenly() -> None:
    config = apply_settings(base(), ["islands={count: 4, every: 2}", "plan=[{epoch: 1, count: 16, local_batch: 64}]"])
    small = scale_workers(config, count=0.3, least=2)
    assert [small.workers.count, small.plan[0].count] == [4, 4]
    assert scale_workers(config, count=2).plan[0].count == 32


SETTINGS = [
    ("data.path=elsewhere", True), ("data.loaders=7", True), ("checkpoint.every=0.5", True), ("kernels=plain", True),
    ("seed=1", False), ("lr.base=0.2", False), ("precision=bf16", False), ("data.augment=flip", False),
    ("islands.count=2", False), ("optimizer.name=lars", False),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "same"), SETTINGS)
def test_whoever_asks_gets_one_answer_to_whether_an_experiment_is_the_same(setting: str, same: bool) -> None:
    changed = apply_settings(base(), [setting])
    assert same_experiment(base(), changed) is same
    assert (find_change(config_to_mapping(base()), changed) is None) is same  # a resumed run
    assert decides_path(setting.partition("=")[0]) is not same  # a report


def test_a_changed_setting_is_named_with_both_values() -> None:
    changed = apply_settings(base(), ["optimizer.momentum=0.5", "data.path=elsewhere"])
    assert find_change(config_to_mapping(base()), changed) == (
        "was started with optimizer.momentum=0.9, but now optimizer.momentum=0.5 is asked for"
    )
    older = config_to_mapping(base())
    del older["islands"], older["lr"]["groups"]  # fields that did not exist then
    assert find_change(older, base()) is None
    assert "lr.invented=3" in str(find_change({**older, "lr": {**older["lr"], "invented": 3}}, base()))
