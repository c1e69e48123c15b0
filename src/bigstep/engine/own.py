"""A user's own pieces of a run, and checks that the engine can train them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bigstep.config import require
from bigstep.engine.learner import Loss
from bigstep.engine.measures import Metric
from bigstep.tables import load_own

__all__ = ["Own", "named_loss", "require_trainable", "require_usable"]


@dataclass(frozen=True)
class Own:
    """A user's own pieces, in place of those that the configuration names; None for those that there are not."""

    model: nn.Module | None = None
    data: Any = None
    """(training set, evaluation set), or what else `as_pair` makes both from."""
    loss: Loss | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    """Makes an optimizer from the model's parameters; its learning rate is set at every step."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Further figures of an evaluation, by name: (output, target) -> a mean over what counts."""
    change: Callable[[nn.Module], nn.Module] | None = None
    """Changes the model before anything is built around it."""


def named_loss(name: str) -> Loss:
    """Return a user's own loss by its `package.module:name`: a function, or the class of a module."""
    found = load_own(name, "loss.name")
    loss: Loss = found() if isinstance(found, type) else found
    return loss


def require_trainable(model: nn.Module, loss: Loss | None) -> None:
    """Refuse what would silently stay untrained, or whose gradients cannot be exchanged.

    >>> require_trainable(nn.Sequential(nn.Embedding(9, 2, sparse=True)), None)
    Traceback (most recent call last):
    bigstep.errors.ConfigError: 0 (Embedding) has sparse gradients, but only dense ones are exchanged: make it with \
sparse=False.
    """
    of_model = list(model.parameters())
    require(
        not any(is_lazy(each) for each in of_model),
        f"{type(model).__name__} has parameters that have no shape yet (lazy modules): let it see one batch, "
        "model(x), before it is trained.",
    )
    require(
        any(each.requires_grad for each in of_model),
        f"{type(model).__name__} has no parameter that can be trained: none of its {len(of_model)} has requires_grad.",
    )
    for name, module in model.named_modules():
        require(
            not getattr(module, "sparse", False) or not isinstance(module, nn.Embedding | nn.EmbeddingBag),
            f"{name} ({type(module).__name__}) has sparse gradients, but only dense ones are exchanged: make it with "
            "sparse=False.",
        )
    left = [each for each in loss.parameters() if each.requires_grad] if isinstance(loss, nn.Module) else []
    require(
        set(left).issubset(of_model),
        f"The loss {type(loss).__name__} has parameters outside the model, which would stay untrained: make them part "
        "of the model (a layer of it), or call loss.requires_grad_(False).",
    )


def require_usable(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse a user's own optimizer that would train nothing of the model, or needs to run the model itself."""
    name = type(optimizer).__name__
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    require(
        not held.isdisjoint(model.parameters()),
        f"The {name} that fit was given holds no parameter of the model and would leave it untrained: make it from the "
        "parameters of the model that fit is given.",
    )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    require(
        closure is None or closure.default is not inspect.Parameter.empty,
        f"{name} asks for the loss several times in a step (a closure), but workers give one gradient per step: use an "
        "optimizer whose step() needs no closure.",
    )
