"""A chunk of a shard: a stretch of its weights, and torch's own optimizer on the parts of parameters that lie there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bigstep.asynchronous.layout import Layout
from bigstep.tables import load

__all__ = ["Chunk"]


class Chunk:
    """Updates its stretch; elements do not depend on one another, so an update by chunks has the same bits."""

    def __init__(self, layout: Layout, weights: Tensor, pieces: list[tuple[int, int, float]]):
        """Args:
        layout: Names the update rule.
        weights: A view of the shard's weights.
        pieces: The parts of parameters that lie here, [start, stop) within the chunk, and their decay; the weights
            behind them are batch norm's moving averages.
        """
        self.weights, self._keep = weights, layout.keep
        # torch's own optimizer works on views of the weights, so the bits are those of a serial run
        self._places = [(first, last) for first, last, _ in pieces]
        rule = layout.rule
        groups = [{"params": [weights[first:last]], "weight_decay": decay} for first, last, decay in pieces]
        self._optimizer = load(rule.home)(groups, lr=1.0, **rule.arguments()) if groups else None
        self._parameters = self._places[-1][1] if groups else 0

    def update(self, vector: Tensor, lr: float, steps: int) -> None:
        """Apply a gradient, summed over `steps` steps, and the statistics that follow it in `vector`."""
        if self._optimizer is not None:
            for group, (first, last) in zip(self._optimizer.param_groups, self._places, strict=True):
                group["lr"] = lr
                group["params"][0].grad = vector[first:last]
            self._optimizer.step()
        averages = self.weights[self._parameters :]
        if len(averages):
            keep = self._keep**steps
            averages.mul_(keep).add_(vector[self._parameters :], alpha=(1 - keep) / steps)

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return a copy of what the update rule remembers."""
        state = self._optimizer.state_dict()["state"] if self._optimizer is not None else {}
        return {
            key: {name: value.clone() if isinstance(value, Tensor) else value for name, value in facts.items()}
            for key, facts in state.items()
        }

    def load_state_dict(self, state: dict[int, dict[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        if self._optimizer is not None:
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
