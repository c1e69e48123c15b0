"""A user's own pieces of a run, and what the engine cannot train of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bigstep.config import require
from bigstep.engine.learner import Loss
from bigstep.engine.measures import Metric
from bigstep.tables import load_own

__all__ = ["Own", "named_loss", "require_trainable"]


@dataclass(frozen=True)
class Own:
    """A user's own pieces, in place of those that the configuration names; None where there is none."""

    model: nn.Module | None = None
    data: Any = None
    """(training set, evaluation set), or what else stands for both."""
    loss: Loss | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    """Makes an optimizer of the model's parameters; its rate is set at every step."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What else an evaluation tells: (output, target) -> a mean over what counts, by name."""
    change: Callable[[nn.Module], nn.Module] | None = None
    """Changes the model before anything is built around it."""


def named_loss(name: str) -> Loss:
    """A user's own, from where it is: a function, or a module's class."""
    found = load_own(name, "loss.name")
    loss: Loss = found() if isinstance(found, type) else found
    return loss


def require_trainable(model: nn.Module, loss: Loss | None) -> None:
    """Refuse what would silently stay as it is, or whose gradients cannot be exchanged.

    >>> require_trainable(nn.Sequential(nn.Embedding(9, 2, sparse=True)), None)
    Traceback (most recent call last):
    bigstep.errors.ConfigError: 0 (Embedding) has sparse gradients, but only dense ones are exchanged: make it with \
sparse=False.
    """
    for name, module in model.named_modules():
        require(
            not getattr(module, "sparse", False) or not isinstance(module, nn.Embedding | nn.EmbeddingBag),
            f"{name} ({type(module).__name__}) has sparse gradients, but only dense ones are exchanged: make it with "
            "sparse=False.",
        )
    of_model = set(model.parameters())
    left = [each for each in loss.parameters() if each.requires_grad] if isinstance(loss, nn.Module) else []
    require(
        of_model.issuperset(left),
        f"The loss {type(loss).__name__} has parameters that are not of the model and would stay as they are: let the "
        "model hold what is to be trained (a layer of it), or call loss.requires_grad_(False).",
    )
