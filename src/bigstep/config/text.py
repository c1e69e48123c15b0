"""Configurations as text: mappings, YAML with each field's sentence as a comment, and `a.b=c`.

An unknown field names its nearest neighbour; a value of the wrong kind names the field and what it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from bigstep.config.edit import flatten, follow_workers
from bigstep.config.schema import RunConfig, WorkersConfig, config_from_mapping, config_to_mapping
from bigstep.config.sentences import sentences_of
from bigstep.errors import ConfigError, nearest, require
from bigstep.tables.optimizers import rules_with
from bigstep.validate import build

__all__ = [
    "apply_settings", "config_from_mapping", "config_from_yaml", "config_to_mapping", "config_to_yaml", "in_one_line",
    "parse_setting", "parse_yaml", "read_yaml",
]  # fmt: skip


def config_from_yaml(text: str, origin: str) -> RunConfig:
    """Read a configuration from YAML; `origin` names the file in messages."""
    return config_from_mapping(parse_yaml(text, origin))


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
    parsed = [parse_setting(setting) for setting in settings]
    mapping = config_to_mapping(config)
    named = [str(value) for path, value in parsed if path == "optimizer.name"]
    rule = config.optimizer.switch(named[-1]) if named else config.optimizer  # first: it decides which fields exist
    mapping["optimizer"] = config_to_mapping(rule)
    for path, value in parsed:
        field = path.removeprefix("optimizer.")
        others = [] if hasattr(rule, field) else rules_with(field)
        require(
            not others or not path.startswith("optimizer."),
            f"{path} goes with optimizer.name={' or '.join(others)} (got {rule.name}).",
        )
        _set(mapping, path, value)
    if config.plan != "auto" and mapping["plan"] == config_to_mapping(config)["plan"]:
        workers = build(WorkersConfig, mapping["workers"], "workers")
        mapping["plan"] = [vars(stage) for stage in follow_workers(config.plan, config.workers, workers)]
    return config_from_mapping(mapping)


def parse_setting(setting: str) -> tuple[str, Any]:
    """Return the field and the value of an `a.b=c` setting.

    >>> parse_setting("lr.base=0.2")
    ('lr.base', 0.2)
    """
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set takes FIELD=VALUE, as in --set lr.base=0.2 (got {setting!r:.60}).")
    return path.strip(), parse_yaml(text, f"--set {setting:.60}")


def _set(mapping: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place = mapping
    for depth, name in enumerate([*parents, last]):
        if not isinstance(place, dict):
            raise ConfigError(f"{'.'.join(path.split('.')[:depth])} has no fields of its own (got --set {path}=…).")
        anything = depth == 2 and parents == ["optimizer", "settings"]  # whatever a user's own rule takes
        if name not in place and not anything:
            where = ".".join([*parents, last][:depth])
            field_names = [f"{where}.{key}" if where else key for key in place]
            raise ConfigError(f"Unknown field {path!r:.80}: {_nearest_field(path, field_names, mapping)}")
        if depth < len(parents):
            place = place[name]
    place[last] = value


def _nearest_field(path: str, beside: list[str], mapping: dict[str, Any]) -> str:
    """Suggest the nearest field at the same level; a name without dots may also be that of a field in a section."""
    near = nearest(path, beside)
    if "." in path:
        return near
    inside = [field for field, _ in flatten(mapping) if "." in field]
    same = [field for field in inside if field.rpartition(".")[2] == path]
    if near.startswith("allowed"):
        same = same or [field for field in inside if path in field.rpartition(".")[2].split("_")]
    return f"did you mean {' or '.join(map(repr, same))}?" if same else near


class _PlainLoader(yaml.SafeLoader):
    """Reads plain YAML values, but no aliases, with which a few lines can expand to more than memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # the stubs lack it
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed; write the value out", mark)
        return super().compose_node(parent, index)


def parse_yaml(text: str, origin: str) -> Any:
    """Return the plain values of a YAML text; `origin` names it in messages."""
    try:
        return yaml.load(text, _PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"{origin}{line} is not valid YAML: {problem}.") from None


def read_yaml(file: Path) -> Any:
    """Return the plain values of a YAML file."""
    try:
        return parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not a text file in UTF-8.") from None


def in_one_line(value: Any) -> str:
    """Write a plain value as YAML, on one line.

    >>> in_one_line((1, "two"))
    '[1, two]'
    """
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _yaml_lines(config: Any, mapping: dict[str, Any], indent: int) -> list[str]:
    lines, space = [], " " * indent
    sentences = sentences_of(type(config))
    for name, value in mapping.items():
        if dataclasses.is_dataclass(getattr(config, name)):
            lines += ["", f"{space}# {sentences[name]}", f"{space}{name}:"]
            lines += _yaml_lines(getattr(config, name), value, indent + 2)
        else:
            lines.append(f"{space}{name}: {in_one_line(value)}".ljust(46) + f"  # {sentences[name]}")
    return lines
