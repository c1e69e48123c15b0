"""Published systems as complete configurations, one a file, each opening with its evidence.

Importing this package loads no recipe and no torch; `load` imports the one that is asked for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

from bigstep.config import Published, RunConfig
from bigstep.errors import ConfigError, nearest

__all__ = ["ASYNCHRONOUS", "ISLANDS", "NAMES", "SEQUENCE", "SYNCHRONOUS", "Recipe", "describe", "load"]

SYNCHRONOUS = ("plain", "fair", "lars", "pfn", "sony", "fujitsu", "tencent", "google", "fastai", "onebit")
"""Recipes whose workers all wait for one another."""

HUGE = ("muon", "leap")
"""Recipes for huge batches, with orthogonalised steps; they have no `paper`, since no ImageNet run is published."""

SEQUENCE = ("adamw", "lamb")
"""Synchronous recipes for text; their presets are `mini` and `books`."""

ISLANDS = ("localsgd", "postlocal", "diloco", "streaming")
"""Recipes whose islands keep weights of their own between meetings: two on images (`mini`, `cifar10`), two on text."""

ASYNCHRONOUS = ("locked", "hogwild", "downpour")
"""Recipes whose replicas do not; they have no preset `paper`, since their papers train other things."""

NAMES = SYNCHRONOUS + HUGE + SEQUENCE + ISLANDS + ASYNCHRONOUS
"""The recipes, in the order in which they are presented."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What there is to know about a recipe before running it."""

    name: str
    """The name that `bigstep train` takes."""
    summary: str
    """One line."""
    techniques: tuple[str, ...]
    """What the system is known for."""
    published: Published
    """The result that its paper reports."""
    presets: tuple[str, ...]
    """Names that `load` takes."""
    docstring: str
    """The evidence: sources, arithmetic, choices and differences."""


def load(name: str, preset: str = "mini") -> RunConfig:
    """Return the configuration of one preset of a recipe.

    Args:
        name: one of `NAMES`.
        preset: `mini` for data that ship with the package, `paper` for ImageNet with the published workers and batch,
            `cifar10` for CIFAR-10 and `books` for a text on one GPU at any batch; some recipes have more.

    >>> load("fair", "paper").batch
    8192
    """
    presets = _presets(_module(name))
    if preset not in presets:
        raise ConfigError(f"The recipe {name} has no preset {preset!r:.60}: {nearest(preset, presets)}")
    return replace(presets[preset](), recipe=name, preset=preset)


def describe(name: str) -> Recipe:
    """Return what there is to know about a recipe.

    >>> describe("pfn").published.batch
    '32,768'
    """
    module = _module(name)
    return Recipe(
        name=name,
        summary=module.SUMMARY,
        techniques=module.TECHNIQUES,
        published=module.PUBLISHED,
        presets=tuple(_presets(module)),
        docstring=inspect.cleandoc(module.__doc__ or ""),
    )


def _module(name: str) -> ModuleType:
    if name not in NAMES:
        raise ConfigError(f"Unknown recipe {name!r:.80}: {nearest(name, NAMES)}")
    return importlib.import_module(f"bigstep.recipes.{name}")


def _presets(module: ModuleType) -> dict[str, Callable[[], RunConfig]]:
    """The functions that a recipe exports are its presets: mini and paper first, then the rest by name."""
    exported = ((name, getattr(module, name)) for name in sorted(module.__all__, key=_place))
    return {name: value for name, value in exported if inspect.isfunction(value)}


def _place(preset: str) -> tuple[bool, bool, str]:
    return preset != "mini", preset != "paper", preset
