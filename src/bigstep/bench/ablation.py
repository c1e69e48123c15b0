"""The techniques that recipes are made of, and how to switch off just one of them in a configuration that uses it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bigstep import recipes
from bigstep.config import RunConfig
from bigstep.tables.codecs import CODECS

__all__ = ["TECHNIQUES", "Technique", "techniques_of"]


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One thing that can be left out."""

    name: str
    used: Callable[[RunConfig], bool]
    off: Callable[[RunConfig], list[str]]
    """Settings, as `--set` takes them, that leave it out and change as little else as possible."""


def techniques_of(config: RunConfig) -> list[Technique]:
    """Return the techniques that a configuration uses, in the order of the table.

    >>> [technique.name for technique in techniques_of(recipes.load("fair"))]
    ['linear LR scaling', 'warm-up', 'zero gamma', 'Nesterov momentum', 'collective halving']
    """
    return [_named(technique, config) for technique in TECHNIQUES if technique.used(config)]


def _named(technique: Technique, config: RunConfig) -> Technique:
    return dataclasses.replace(technique, name=technique.name.format(config=config))


def _set(path: str, value: Any) -> Callable[[RunConfig], list[str]]:
    return lambda config: [f"{path}={json.dumps(value)}"]


def _without_warmup(config: RunConfig) -> list[str]:
    """Start at the full rate: the warm-up's epochs stay, so that the decay keeps its place."""
    pieces = [dataclasses.asdict(piece) for piece in config.lr.schedule]
    for piece in pieces:
        if piece["shape"] == "warmup":
            piece.update(shape="constant", start=piece["end"])
    return [f"lr.schedule={json.dumps(pieces)}"]


def _without_lars(config: RunConfig) -> list[str]:
    """Momentum SGD with the rate that was tuned for `plain`: LARS's own rate means nothing to SGD."""
    rate = recipes.load("plain", "mini").lr
    return [
        "optimizer.name=sgd", f"lr.base={rate.base}", f"lr.scaling={rate.scaling}", f"lr.base_batch={rate.base_batch}",
    ]  # fmt: skip


def _without_codec(config: RunConfig) -> list[str]:
    """Send fp32; codes that cannot be summed need a collective of their own, so the ring takes its place."""
    if CODECS[config.exchange.codec].summable:
        return ["exchange.codec=none"]
    exchange = {**dataclasses.asdict(config.exchange), "codec": "none", "collective": "ring"}
    return [f"exchange={json.dumps(exchange)}"]


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="linear LR scaling",
        used=lambda config: config.lr.scaling == "linear" and config.asynchronous.method == "none",
        off=_set("lr.scaling", "none"),
    ),
    Technique(
        name="warm-up",
        used=lambda config: any(piece.shape == "warmup" for piece in config.lr.schedule),
        off=_without_warmup,
    ),
    Technique(
        name="RMSprop warm-up",
        used=lambda config: config.optimizer.name == "rmsprop_warmup",
        off=_set("optimizer.name", "sgd"),
    ),
    Technique(name="LARS", used=lambda config: config.optimizer.name == "lars", off=_without_lars),
    Technique(
        name="label smoothing",
        used=lambda config: config.loss.label_smoothing > 0,
        off=_set("loss.label_smoothing", 0.0),
    ),
    Technique(name="batch-size control", used=lambda config: bool(config.plan), off=_set("plan", [])),
    Technique(
        name="last-batch statistics",
        used=lambda config: config.norm.statistics == "last_batch",
        off=_set("norm.statistics", "moving"),
    ),
    Technique(name="zero gamma", used=lambda config: config.norm.zero_gamma, off=_set("norm.zero_gamma", False)),
    Technique(
        name="Nesterov momentum",
        used=lambda config: getattr(config.optimizer, "nesterov", False),
        off=_set("optimizer.nesterov", False),
    ),
    Technique(name="progressive resizing", used=lambda config: bool(config.data.sizes), off=_set("data.sizes", [])),
    Technique(
        name="codec {config.exchange.codec}",
        used=lambda config: config.exchange.codec != "none",
        off=_without_codec,
    ),
    Technique(
        name="error feedback",
        used=lambda config: CODECS[config.exchange.codec].loses == "carried" and config.exchange.error_feedback,
        off=_set("exchange.error_feedback", False),
    ),
    Technique(
        name="collective {config.exchange.collective}",
        used=lambda config: config.exchange.collective not in ("ring", "gather"),
        off=_set("exchange.collective", "ring"),
    ),
    Technique(
        name="warm start",
        used=lambda config: config.asynchronous.method == "downpour" and config.asynchronous.warm_start > 0,
        off=_set("asynchronous.warm_start", 0.0),
    ),
)
"""In the order in which they are tried."""
