"""Configurations as text: mappings, YAML with the field's sentence as comment, and `a.b=c`.

An unknown field names its nearest neighbour; a value of the wrong kind names the field and what it takes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Iterable
from typing import Any

import yaml

from bigstep.config import OptimizerConfig, RunConfig, Stage
from bigstep.errors import ConfigError, nearest, require
from bigstep.tables.models import model_names
from bigstep.tables.optimizers import OPTIMIZERS, rules_with
from bigstep.tables.schedules import SHAPES
from bigstep.validate import build

__all__ = [
    "apply_settings",
    "config_from_mapping",
    "config_from_yaml",
    "config_to_mapping",
    "config_to_yaml",
    "finished_on_one",
    "stretched",
]

NAMES: dict[str, Iterable[str]] = {"optimizers": OPTIMIZERS, "shapes": SHAPES, "models": model_names()}
"""What stands for `{optimizers}` and the like in the sentence of a field."""


def config_from_mapping(mapping: Any) -> RunConfig:
    """Build a `RunConfig` from plain dicts, lists and scalars.

    >>> config_from_mapping({"workers": {"count": 8, "local_batch": 32}, "epochs": 2, "lr": {"base": 0.1}}).batch
    256
    """
    return build(RunConfig, mapping)


def config_to_mapping(config: RunConfig | OptimizerConfig) -> dict[str, Any]:
    """Return `config` as plain dicts and lists, ready for JSON."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(config)))


def config_from_yaml(text: str, origin: str) -> RunConfig:
    """Read a configuration from YAML; `origin` names the file in messages."""
    return config_from_mapping(_parse_yaml(text, origin))


def config_to_yaml(config: RunConfig) -> str:
    """Write a configuration as YAML, with the sentence of each field as a comment."""
    return "\n".join(_yaml_lines(config, config_to_mapping(config), 0)) + "\n"


def apply_settings(config: RunConfig, settings: Iterable[str]) -> RunConfig:
    """Return `config` with `a.b=c` settings applied in order; values are read as YAML.

    The stages of a batch plan follow `workers`, in proportion, unless the plan is set too.

    >>> base = config_from_mapping({"workers": {"count": 8, "local_batch": 32}, "epochs": 2, "lr": {"base": 0.1}})
    >>> apply_settings(base, ["workers.count=16", "optimizer.name=lars"]).optimizer.name
    'lars'
    """
    parsed = [_parse_setting(setting) for setting in settings]
    mapping = config_to_mapping(config)
    named = [str(value) for path, value in parsed if path == "optimizer.name"]
    rule = config.optimizer.switch(named[-1]) if named else config.optimizer  # first: it decides which fields there are
    mapping["optimizer"] = config_to_mapping(rule)
    for path, value in parsed:
        others = rules_with(path.removeprefix("optimizer."))
        require(
            rule.name in others or not others or not path.startswith("optimizer."),
            f"{path} goes with optimizer.name={' or '.join(others)} (got {rule.name}).",
        )
        _set(mapping, path, value)
    changed = config_from_mapping(mapping)
    return changed if changed.plan != config.plan else _with_plan_following(changed, config)


def _parse_setting(setting: str) -> tuple[str, Any]:
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set takes FIELD=VALUE, as in --set lr.base=0.2 (got {setting!r}).")
    return path.strip(), _parse_yaml(text, f"--set {setting}")


def _with_plan_following(changed: RunConfig, config: RunConfig) -> RunConfig:
    count = changed.workers.count / config.workers.count
    local = changed.workers.local_batch / config.workers.local_batch
    plan = tuple(
        dataclasses.replace(
            stage, count=max(1, round(stage.count * count)), local_batch=max(1, round(stage.local_batch * local))
        )
        for stage in config.plan
    )
    return dataclasses.replace(changed, plan=plan)


def stretched(config: RunConfig, epochs: float) -> RunConfig:
    """Return `config` with its epochs and its exchange's dense steps scaled: a shorter run still warms up and ends."""
    if not 0 < epochs < float("inf"):
        raise ConfigError(f"--epochs is {epochs}, but it must be greater than 0.")
    ratio = epochs / config.epochs
    pieces = tuple(
        dataclasses.replace(piece, until=piece.until * ratio, at=tuple(at * ratio for at in piece.at))
        for piece in config.lr.schedule
    )
    return dataclasses.replace(
        config,
        epochs=epochs,
        lr=dataclasses.replace(config.lr, schedule=pieces),
        plan=tuple(dataclasses.replace(stage, epoch=stage.epoch * ratio) for stage in config.plan),
        data=dataclasses.replace(
            config.data, sizes=tuple(dataclasses.replace(size, epoch=size.epoch * ratio) for size in config.data.sizes)
        ),
        exchange=dataclasses.replace(config.exchange, warmup_steps=round(config.exchange.warmup_steps * ratio)),
        optimizer=config.optimizer.stretch(ratio),
    )


def finished_on_one(config: RunConfig, epochs: float) -> RunConfig:
    """Return `config` with its last `epochs` in small batches on one worker: parallel for speed, then precise.

    A last stage with one worker of `workers.local_batch` samples is added to the plan. Its rate follows the batch as
    the recipe's rule says: rate = b / B of what the schedule gives where the rate grows with the batch or not at all
    (Goyal's linear rule, read backwards), sqrt(b / B) under scaling=sqrt; B is the batch of the stage before, b the
    new one. With lr.follow_plan that happens anyway, and the stage leaves the rate alone.

    >>> base = config_from_mapping({"workers": {"count": 8, "local_batch": 32}, "epochs": 4, "lr": {"base": 0.1}})
    >>> finished_on_one(base, 1).plan
    (Stage(epoch=3.0, count=1, local_batch=32, rate=0.125),)

    Reference: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1 (the linear rule).
    """
    if not 0 < epochs < config.epochs:
        raise ConfigError(
            f"--finish-on-one is {epochs:g}, but it must lie between 0 and the {config.epochs:g} epochs of the run."
        )
    if config.asynchronous.method != "none":
        raise ConfigError(
            f"--finish-on-one is for synchronous runs; a {config.asynchronous.method} run has no batch to shrink: "
            "leave it out."
        )
    begin = config.epochs - epochs
    kept = tuple(stage for stage in config.plan if stage.epoch < begin)
    before = kept[-1].count * kept[-1].local_batch if kept else config.batch
    ratio = config.workers.local_batch / before
    rate = 1.0 if config.lr.follow_plan else ratio**0.5 if config.lr.scaling == "sqrt" else ratio
    earlier = kept[-1].rate if kept else 1.0
    last = Stage(epoch=begin, count=1, local_batch=config.workers.local_batch, rate=earlier * rate)
    return dataclasses.replace(config, plan=(*kept, last))


def _set(mapping: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place = mapping
    for depth, name in enumerate([*parents, last]):
        if not isinstance(place, dict):
            raise ConfigError(f"{'.'.join(path.split('.')[:depth])} has no fields of its own (got --set {path}=…).")
        if name not in place:
            where = ".".join([*parents, last][:depth])
            field_names = [f"{where}.{key}" if where else key for key in place]
            raise ConfigError(f"Unknown field {path!r}: {nearest(path, field_names)}")
        if depth < len(parents):
            place = place[name]
    place[last] = value


class _PlainLoader(yaml.SafeLoader):
    """YAML's plain values without aliases, with which a few lines can stand for more than memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # the stubs lack it
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not used here; write it out", mark)
        return super().compose_node(parent, index)


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, _PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"{origin}{line} is not valid YAML: {problem}.") from None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _sentences(cls: type) -> dict[str, str]:
    """The string under each field, read from the source of the class and its parents, with names from the tables."""
    sentences = {}
    for parent in reversed(cls.__mro__[:-1]):
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0]).body
        for statement, follower in zip(body, body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(follower, ast.Expr):
                name = typing.cast(ast.Name, statement.target).id
                sentences[name] = str(typing.cast(ast.Constant, follower.value).value)
    for name, sentence in sentences.items():
        for table, names in NAMES.items():
            sentences[name] = sentence = sentence.replace(f"{{{table}}}", ", ".join(names))
    return sentences


def _yaml_lines(config: Any, mapping: dict[str, Any], indent: int) -> list[str]:
    lines, space = [], " " * indent
    sentences: dict[str, str] = _sentences(type(config))  # type: ignore[arg-type]  # a class is hashable
    for name, value in mapping.items():
        if dataclasses.is_dataclass(getattr(config, name)):
            lines += ["", f"{space}# {sentences[name]}", f"{space}{name}:"]
            lines += _yaml_lines(getattr(config, name), value, indent + 2)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
            lines.append(f"{space}{name}: {text}".ljust(46) + f"  # {sentences[name]}")
    return lines
