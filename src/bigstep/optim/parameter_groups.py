"""Which parameters are decayed and adapted, which are matrices, and which are neither."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from bigstep.errors import ConfigError

__all__ = ["kinds_of", "parameter_groups"]

# batch and instance norms of every dimension share _NormBase, which torch does not export under a public name
NORM_MODULES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


def parameter_groups(
    model: nn.Module, weight_decay: float, rates: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Split the parameters of a model into groups: weights are decayed and adapted, biases and norm parameters are not.

    A parameter is not decayed or adapted if it has at most one dimension (biases, scales) or belongs to a norm module,
    even if other modules share it. Every other parameter is a weight, embeddings included. Each parameter appears once,
    however many modules share it.

    Args:
        model: Any module.
        weight_decay: Decay of the weights.
        rates: Patterns of parameter names, each with a factor for the rate of those parameters; the first match
            decides. Such parameters get groups of their own, with that factor as `rate`.

    Returns:
        Groups for any torch optimizer, at most two without `rates`: the weights with `weight_decay` and `adapt=True`,
        the rest with no decay and `adapt=False` (LARS then uses the plain rate, LAMB is AdamW). Empty groups are left
        out. `kind` tells for each parameter whether `Muon` may treat it as a matrix; see `kinds_of`.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    >>> [(len(group["params"]), group["weight_decay"], group["adapt"]) for group in parameter_groups(model, 5e-5)]
    [(2, 5e-05, True), (4, 0.0, False)]

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 5.1 (no decay of gamma and beta); the LARS
    optimizer of TensorFlow's contrib package, which neither decays nor adapts biases and batch-norm parameters.

    Differs from the paper: You et al. do not say that LARS leaves out one-dimensional parameters; the norms of these
    are so small at the start that an adapted rate would all but freeze them.
    """
    of_norms, kinds = _parameters_of(model, NORM_MODULES), kinds_of(model)
    patterns = dict(rates or {})
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
            raise ConfigError(f"The pattern {pattern!r} of lr.groups matches no parameter; correct it or leave it out.")
    members: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
    for name, parameter in model.named_parameters():  # torch yields shared parameters once
        adapt = parameter.ndim > 1 and parameter not in of_norms
        rate = next((patterns[pattern] for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), 1.0)
        members.setdefault((adapt, rate), []).append(parameter)
    return [
        {
            "params": params,
            "weight_decay": weight_decay if adapt else 0.0,
            "adapt": adapt,
            "kind": [kinds[parameter] for parameter in params],
        }
        | ({} if rate == 1 else {"rate": rate})
        for (adapt, rate), params in members.items()
        if params
    ]


def kinds_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Tell for each parameter whether it is a "matrix", which maps one hidden layer to the next, or "rest".

    The rest are parameters with at most one dimension, norms, embeddings, the head, and parameters that a module with
    submodules holds itself (class tokens, position tables). The head is the last linear or convolution layer, unless it
    has as many outputs as an embedding is wide: then the network ends in that embedding.

    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8))
    >>> list(kinds_of(model).values())
    ['rest', 'matrix', 'rest', 'matrix', 'rest', 'rest', 'rest']
    >>> list(kinds_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))).values())
    ['matrix', 'rest', 'rest', 'rest']
    """
    rest = _parameters_of(model, (*NORM_MODULES, *EMBEDDINGS))
    widths = {module.embedding_dim for module in model.modules() if isinstance(module, EMBEDDINGS)}
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    if layers and _outputs_of(layers[-1]) not in widths:
        rest.update(layers[-1].parameters(recurse=False))
    for module in model.modules():
        if next(module.children(), None) is not None and not isinstance(module, nn.MultiheadAttention):
            rest.update(module.parameters(recurse=False))
    return {p: "rest" if p.ndim <= 1 or p in rest else "matrix" for p in model.parameters()}


def _outputs_of(layer: nn.Module) -> int:
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return int(outputs)  # type: ignore[arg-type]  # one of LAYERS


def _parameters_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[nn.Parameter]:
    return {p for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)}
