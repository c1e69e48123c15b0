"""Which parameters are decayed and adapted, and which are left alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from bigstep.errors import ConfigError

__all__ = ["parameter_groups"]

# batch and instance norms of every dimension share _NormBase, which torch does not export under a public name
NORM_MODULES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(
    model: nn.Module, weight_decay: float, rates: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Split the parameters of a model: weights are decayed and adapted, biases and norm parameters are not.

    A parameter is left alone if it has at most one dimension (biases, scales) or belongs to a norm module; everything
    else is a weight. Each parameter appears once, also when modules share it; one that several modules share is left
    alone if any of them is a norm.

    Args:
        model: Any module.
        weight_decay: Decay of the weights.
        rates: Patterns of parameters' names, each with what their rate is to be multiplied by; the first that fits
            decides. Such parameters have groups of their own, with that factor as `rate`.

    Returns:
        Groups for any torch optimizer, at most two without `rates`: the weights with `weight_decay` and `adapt=True`,
        the rest with no decay and `adapt=False` (LARS then uses the plain rate). An empty group is left out.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    >>> [(len(group["params"]), group["weight_decay"], group["adapt"]) for group in parameter_groups(model, 5e-5)]
    [(2, 5e-05, True), (4, 0.0, False)]

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 5.1 (no decay of gamma and beta); the LARS
    optimizer of TensorFlow's contrib package, which skips biases and batch-norm parameters in both ways.

    Differs from the paper: You et al. do not say that LARS skips one-dimensional parameters; their norms are so
    small at the start that an adapted rate would all but freeze them.
    """
    of_norms = {
        parameter
        for module in model.modules()
        if isinstance(module, NORM_MODULES)
        for parameter in module.parameters(recurse=False)
    }
    patterns = dict(rates or {})
    for pattern in patterns:
        if not fnmatch.filter([name for name, _ in model.named_parameters()], pattern):
            raise ConfigError(f"The pattern {pattern!r} of lr.groups fits no parameter; correct it or leave it out.")
    members: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
    for name, parameter in model.named_parameters():  # each once: torch leaves out what it has seen
        adapt = parameter.ndim > 1 and parameter not in of_norms
        rate = next((patterns[pattern] for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), 1.0)
        members.setdefault((adapt, rate), []).append(parameter)
    return [
        {"params": params, "weight_decay": weight_decay if adapt else 0.0, "adapt": adapt}
        | ({} if rate == 1 else {"rate": rate})
        for (adapt, rate), params in members.items()
        if params
    ]
