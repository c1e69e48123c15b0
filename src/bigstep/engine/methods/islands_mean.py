"""The mean of all islands: the network that is evaluated, and that a run ends with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bigstep.engine.exact import ExactSum
from bigstep.engine.methods.island import Island
from bigstep.engine.methods.outer import cut_into_fragments
from bigstep.norm.statistics import statistics_of, tracking_norms

__all__ = ["put_mean_under"]

_AVERAGED_AT_ONCE = 1 << 24
"""Values averaged at once: a rank copies at most about so many of each of its islands, never all."""


def put_mean_under(model: nn.Module, islands: Sequence[Island], count: int, add_up: ExactSum) -> None:
    """Put the mean of all islands under a model: their weights, and the statistics of their batch norms.

    Every rank must call this. The islands' own weights and statistics stay as they are; before it trains again, the
    model needs an island put under it.

    Args:
        model: The one that the islands of this rank use in turn.
        islands: Those of this rank.
        count: Islands on all ranks.
        add_up: Adds up what the islands hold, for a mean that does not depend on who hosts them.
    """
    parameters, norms = list(model.parameters()), statistics_of(tracking_norms(model))
    held: list[list[Tensor]] = []
    for island in islands:
        island.method.learner.statistics.synchronize(island.method.ranks.sum_)
        held.append([*island.weights, *(buffer.clone() for buffer in norms)])
    sizes = [each.numel() for each in held[0]]
    for some in cut_into_fragments(sizes, -(-sum(sizes) // _AVERAGED_AT_ONCE)):
        for index, mean in zip(some, _mean([[own[i] for i in some] for own in held], count, add_up), strict=True):
            if index < len(parameters):
                parameters[index].data = mean
            else:
                norms[index - len(parameters)].copy_(mean)


def _mean(held: Sequence[Sequence[Tensor]], count: int, add_up: ExactSum) -> list[Tensor]:
    """Return the means over all islands of some tensors, given those of each island of this rank."""
    shapes = [each.shape for each in held[0]]
    parts = [torch.cat([each.detach().reshape(-1) for each in own]) for own in held]
    mean = add_up(parts, shapes).div_(count)
    pieces = mean.split_with_sizes([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
