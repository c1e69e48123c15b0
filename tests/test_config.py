"""Configurations as text: they round-trip, and what cannot be run is refused with a useful sentence."""

from __future__ import annotations

import pytest

from bigstep.config import RunConfig
from bigstep.config.text import apply_settings, config_from_mapping, config_from_yaml, config_to_mapping, config_to_yaml
from bigstep.errors import ConfigError

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
        ("lr=1", "must be a mapping"),
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
        ("plan=3", "takes a list"),
        ("lr.schedule=[{shape: wave, until: 3}]", "lr.schedule.shape is 'wave'"),
        ("lr.schedule=[{shape: table, until: 3, at: [1], values: [1]}]", "one more value"),
        ("lr.schedule=[{shape: constant, until: 3}, {shape: constant, until: 2}]", "follow one another"),
        ("lr.base=[", "not valid YAML"),
        ("lr.warmup_batch=-1", "must not be negative"),
        ("checkpoint.keep=0", "greater than 0"),
        ("data.holdout=1.5", "less than 1"),
        ("data.sizes=[{epoch: 1, image_size: 0}]", "greater than 0"),
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
