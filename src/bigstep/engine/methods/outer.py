"""What happens when islands meet: the mean of what each has moved is a gradient, and an outer optimizer applies it.

With theta the weights that all islands agreed on last, theta_k those of island k and n_k the samples it has seen::

    Delta = sum over k of (n_k / n) (theta - theta_k)             the outer gradient: theta is where they started
    average    theta <- theta - Delta                             which is the mean of theta_k
    sgd        v <- m v + Delta,   theta <- theta - lr v
    nesterov   v <- m v + Delta,   theta <- theta - lr (Delta + m v)

References:
    Stich, Local SGD Converges Fast and Communicates Little, 2018 (averaging); Douillard et al., DiLoCo: Distributed
    Low-Communication Training of Language Models, 2023, algorithm 1 (Nesterov); Douillard et al., Streaming DiLoCo,
    2025 (fragments that meet in turn, while the islands compute on).

Differs from the papers: islands are weighted by the samples they have seen since they last met; these numbers differ
after the last batch of an epoch, and if an island has missed a meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigstep.config import OuterConfig
from bigstep.engine.methods.meeting import Meeting, Transport

__all__ = ["Fragment", "Outer", "cut_into_fragments"]


@dataclass
class Fragment:
    """Parameters that are averaged together: their agreed weights, and the outer velocity."""

    indices: tuple[int, ...]
    """Indices of the parameters, in the order of the model."""
    agreed: Tensor
    """theta, flat."""
    velocity: Tensor


def cut_into_fragments(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Divide parameters, in the order of the model, into at most `count` parts of about equal size.

    >>> cut_into_fragments([4, 4, 4, 12], 2), cut_into_fragments([5], 3)
    ([(0, 1, 2), (3,)], [(0,)])
    """
    total, before = sum(sizes), 0
    parts: dict[int, list[int]] = {}
    for index, size in enumerate(sizes):
        middle = before + size / 2
        parts.setdefault(min(count - 1, int(count * middle / max(total, 1))), []).append(index)
        before += size
    return [tuple(part) for _, part in sorted(parts.items())]


class Outer:
    """The agreed weights, cut into fragments, and the rule that moves them.

    Args:
        weights: Those that all islands start from.
        config: The outer optimizer.
        fragments: The number of parts into which the network is cut.
        transport: Combines the moves of islands.
    """

    def __init__(self, weights: Sequence[Tensor], config: OuterConfig, fragments: int, transport: Transport):
        self._config, self._transport = config, transport
        # average the weights themselves: no difference is rounded, so that a single island changes nothing
        self._takes_mean = config.name == "average" and not transport.loses
        self.fragments = [
            Fragment(indices, _flat(weights, indices), torch.zeros_like(_flat(weights, indices)))
            for indices in cut_into_fragments([weight.numel() for weight in weights], fragments)
        ]
        self._shapes = [weight.shape for weight in weights]

    def start(self, number: int, islands: Mapping[int, Sequence[Tensor]], share: Callable[[int], float]) -> Meeting:
        """Send off what this rank's islands have moved in a fragment; every rank must call this at the same step.

        Args:
            number: Of the fragment.
            islands: The weights of each island of this rank.
            share: The weight of an island in the mean; 0 for one that misses the meeting.
        """
        fragment = self.fragments[number]

        def moved() -> Iterator[tuple[int, Tensor]]:
            for island, weights in islands.items():
                here = _flat(weights, fragment.indices)
                yield island, (here if self._takes_mean else fragment.agreed - here).mul_(share(island))

        present = {island: share(island) > 0 for island in islands}
        return self._transport.start(number, [self._shapes[i] for i in fragment.indices], moved(), present)

    @torch.no_grad()
    def apply(self, number: int, mean: Tensor) -> None:
        """Move the agreed weights of a fragment by the outer gradient."""
        fragment, rule = self.fragments[number], self._config
        if self._takes_mean:
            fragment.agreed.copy_(mean)
            return
        if rule.name == "average":
            fragment.agreed.sub_(mean)
            return
        fragment.velocity.mul_(rule.momentum).add_(mean)
        step = mean.add(fragment.velocity, alpha=rule.momentum) if rule.name == "nesterov" else fragment.velocity
        fragment.agreed.sub_(step, alpha=rule.lr)

    @torch.no_grad()
    def hand_out(self, number: int, weights: Sequence[Tensor], keep: float = 0.0) -> None:
        """Bring an island to the agreed weights of a fragment; its own weights count `keep` in the result."""
        fragment = self.fragments[number]
        pieces = fragment.agreed.split_with_sizes([self._shapes[i].numel() for i in fragment.indices])
        for index, piece in zip(fragment.indices, pieces, strict=True):
            weights[index].mul_(keep).add_(piece.view(self._shapes[index]), alpha=1 - keep)

    def state_dict(self) -> dict[str, Any]:
        """Return the agreed weights and velocities, the same on every rank, and the residuals of its islands."""
        return {
            "agreed": [fragment.agreed for fragment in self.fragments],
            "velocity": [fragment.velocity for fragment in self.fragments],
            "kept": self._transport.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there, on any number of ranks."""
        for fragment, agreed, velocity in zip(self.fragments, state["agreed"], state["velocity"], strict=True):
            fragment.agreed.copy_(agreed)
            fragment.velocity.copy_(velocity)
        self._transport.load_state_dict(state["kept"])


def _flat(weights: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    return torch.cat([weights[index].detach().reshape(-1) for index in indices])
