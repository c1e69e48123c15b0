"""Published systems as complete configurations, one per file, each opening with its evidence.

Importing this package loads no recipe and no torch; `load` imports the one that is asked for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from bigstep.config import Published, RunConfig
from bigstep.config.schema import config_from_mapping, config_to_mapping
from bigstep.config.trust import names_code, require_own, require_trust
from bigstep.errors import ConfigError, nearest
from bigstep.tables import load_own
from bigstep.tables.plugins import brought, load_brought

__all__ = [
    "ASYNCHRONOUS",
    "ISLANDS",
    "NAMES",
    "SEQUENCE",
    "SYNCHRONOUS",
    "Recipe",
    "describe",
    "exists",
    "known",
    "load",
    "read",
]

SYNCHRONOUS = ("plain", "fair", "lars", "pfn", "sony", "fujitsu", "tencent", "google", "fastai", "onebit")
"""Recipes whose workers all wait for one another."""

HUGE = ("muon", "leap")
"""Recipes for huge batches, with orthogonalised steps; none has a preset `paper`: no ImageNet run is published."""

SEQUENCE = ("adamw", "lamb")
"""Synchronous recipes for text; their presets are `mini` and `books`."""

ISLANDS = ("localsgd", "postlocal", "diloco", "streaming")
"""Recipes whose islands keep weights of their own between meetings: two on images (`mini`, `cifar10`), two on text."""

ASYNCHRONOUS = ("locked", "hogwild", "downpour")
"""Recipes without common steps; they have no preset `paper`, since their papers train other things."""

NAMES = SYNCHRONOUS + HUGE + SEQUENCE + ISLANDS + ASYNCHRONOUS
"""The recipes, in the order in which they are presented."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a reader should know about a recipe before running it."""

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
        name: one of `known()`, or `package.module:function` for a function of your own that returns a `RunConfig`.
        preset: `mini` for data that ship with the package, `paper` for ImageNet with the published workers and batch,
            `cifar10` for CIFAR-10 and `books` for a text on one GPU at any batch; some recipes have more.

    >>> load("fair", "paper").batch
    8192
    """
    if names_code(name):
        return _own(name)
    presets = _presets(_module(name))
    if preset not in presets:
        raise ConfigError(f"The recipe {name} has no preset {preset!r:.60}: {nearest(preset, presets)}")
    return replace(presets[preset](), recipe=name, preset=preset)


def exists(name: str) -> bool:
    """Whether there is a recipe of this name, here or in an installed package."""
    return name in NAMES or name in brought("recipes")


def known() -> tuple[str, ...]:
    """Return the names of all recipes: those of this package, then those that installed packages bring."""
    return (*NAMES, *(name for name in brought("recipes") if name not in NAMES))


def read(mapping: Any, origin: object, *, trusted: bool = False) -> RunConfig:
    """Return the configuration that a file holds; if its recipe is a function, the file changes what that returns.

    Args:
        mapping: What the file holds.
        origin: The file, for messages.
        trusted: Whether the user has allowed code that it names to run.

    >>> read({"workers": {"count": 8, "local_batch": 32}, "epochs": 2, "lr": {"base": 0.1}}, "run.yaml").batch
    256
    """
    name = mapping.get("recipe") if isinstance(mapping, Mapping) else None
    if isinstance(name, str) and names_code(name):
        require_trust([name], origin, trusted=trusted)
        base, rule = _own(name), mapping.get("optimizer")
        if isinstance(rule, Mapping) and "name" in rule:  # it decides which settings exist
            base = replace(base, optimizer=base.optimizer.switch(str(rule["name"])))
        mapping = _changed(config_to_mapping(base), mapping)
    return config_from_mapping(mapping)


def _changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings with some of their fields replaced."""
    both = {
        name: _changed(base[name], value)
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
        else value
        for name, value in changes.items()
    }
    return {**base, **both}


def _own(name: str) -> RunConfig:
    require_own(name, "recipe")
    made = load_own(name, "recipe")()
    if not isinstance(made, RunConfig):
        raise ConfigError(f"recipe: {name} returned {type(made).__name__}, but a RunConfig is needed.")
    return replace(made, recipe=name, preset="custom")


def describe(name: str) -> Recipe:
    """Return the description of a recipe.

    >>> describe("pfn").published.batch
    '32,768'
    """
    if names_code(name):
        raise ConfigError(f"{name} is a function, which has no evidence to show; --yaml shows its configuration.")
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
        if name in brought("recipes"):
            module: ModuleType = load_brought("recipes", name, ModuleType)
            return module
        raise ConfigError(f"Unknown recipe {name!r:.80}: {nearest(name, known())}")
    return importlib.import_module(f"bigstep.recipes.{name}")


def _presets(module: ModuleType) -> dict[str, Callable[[], RunConfig]]:
    """The functions that a recipe exports are its presets: mini and paper first, then the rest by name."""
    exported = ((name, getattr(module, name)) for name in sorted(module.__all__, key=_place))
    return {name: value for name, value in exported if inspect.isfunction(value)}


def _place(preset: str) -> tuple[bool, bool, str]:
    return preset != "mini", preset != "paper", preset
