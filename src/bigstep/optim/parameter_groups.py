"""Which parameters are decayed and adapted, and which are left alone."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["parameter_groups"]

# batch and instance norms of every dimension share _NormBase, which torch does not export under a public name
NORM_MODULES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters of a model: weights are decayed and adapted, biases and norm parameters are not.

    A parameter is left alone if it has at most one dimension (biases, scales) or belongs to a norm module; everything
    else is a weight. Each parameter appears once, also when modules share it; one that several modules share is left
    alone if any of them is a norm.

    Args:
        model: Any module.
        weight_decay: Decay of the weights.

    Returns:
        At most two groups for any torch optimizer: the weights with `weight_decay` and `adapt=True`, the rest with
        no decay and `adapt=False` (LARS then uses the plain rate). An empty group is left out.

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
    weights: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in model.parameters():  # each once: torch leaves out what it has seen
        (rest if parameter.ndim <= 1 or parameter in of_norms else weights).append(parameter)
    groups = [
        {"params": weights, "weight_decay": weight_decay, "adapt": True},
        {"params": rest, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]
