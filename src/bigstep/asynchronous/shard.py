"""One shard of the parameter server: its part of the weights, the update rule, and the count of what was overtaken.

No network and no clock here: the order of calls is the order of events.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigstep.asynchronous.layout import Layout

__all__ = ["Push", "Receipt", "Shard"]


@dataclass(frozen=True)
class Push:
    """What comes with a gradient."""

    replica: int
    sequence: int
    """1, 2, 3, … for each replica; a push that is sent again after a broken connection is applied once."""
    read_at: int
    """The version of the weights that the gradient was computed on."""
    lr: float
    steps: int
    """Steps whose gradients are summed in it."""
    samples: int


@dataclass(frozen=True)
class Receipt:
    """What became of a push."""

    accepted: bool
    staleness: int
    """Updates that came between the read and this write."""
    version: int
    """Of the weights afterwards."""


class Shard:
    """Weights and update rule of one shard; safe to call from several threads.

    With AdaGrad, for each element i of a push g:  s_i <- s_i + g_i^2,  w_i <- w_i - gamma * g_i / (sqrt(s_i) + eps).

    >>> layout = Layout(sizes=(2,), decays=(0.0,), averages=0, shards=1, dtype="float32", keep=0.9, max_staleness=0,
    ...                 save_every=0, keep_checkpoints=1, optimizer={"name": "adagrad", "eps": 0.0})
    >>> shard = Shard(layout, 0)
    >>> shard.push(Push(replica=0, sequence=1, read_at=0, lr=0.1, steps=1, samples=4), torch.tensor([3.0, -5.0]))
    Receipt(accepted=True, staleness=0, version=1)
    >>> shard.fetch()  # the first step of AdaGrad has the size of gamma, whatever the gradient
    (tensor([-0.1000,  0.1000]), 1)
    >>> shard.push(Push(replica=1, sequence=1, read_at=0, lr=0.1, steps=1, samples=4), torch.zeros(2)).staleness
    1

    Reference: Dean et al., "Large Scale Distributed Deep Networks", 2012, section 4.1.
    """

    def __init__(self, layout: Layout, index: int):
        self.layout, self.index = layout, index
        start, stop = layout.bounds(index)
        self._weights = torch.zeros(stop - start, dtype=layout.torch_dtype)
        # views: torch's own optimizer works on the pieces of parameters that lie here, so the bits are a serial run's
        self._places = [(first, last) for first, last, _ in layout.pieces(index)]
        groups = [
            {"params": [self._weights[first:last]], "weight_decay": decay}
            for first, last, decay in layout.pieces(index)
        ]
        self._optimizer = _optimizer(layout, groups) if groups else None
        self._averages = self._weights[max(0, layout.parameters - start) :]
        self._lock = threading.Lock()
        self._applied: dict[int, int] = {}
        self.version = 0
        self.shares = self.samples = self.refused = 0
        self.staleness: Counter[int] = Counter()

    def put(self, weights: Tensor) -> None:
        """Set the initial weights."""
        with self._lock:
            self._weights.copy_(weights)

    def fetch(self) -> tuple[Tensor, int]:
        """Return a copy of the weights and their version."""
        with self._lock:
            return self._weights.clone(), self.version

    def push(self, push: Push, vector: Tensor) -> Receipt:
        """Apply a gradient (and the statistics behind it), unless it came before or too much overtook it."""
        with self._lock:
            # a shard that was restarted may be older than what a replica read from it
            staleness = max(0, self.version - push.read_at)
            if push.sequence <= self._applied.get(push.replica, 0):
                return Receipt(True, staleness, self.version)
            self._applied[push.replica] = push.sequence
            if 0 < self.layout.max_staleness < staleness:
                self.refused += 1
                return Receipt(False, staleness, self.version)
            self._update(push, vector)
            self.version += 1
            self.shares += push.steps
            self.samples += push.samples
            self.staleness[staleness] += 1
            return Receipt(True, staleness, self.version)

    def _update(self, push: Push, vector: Tensor) -> None:
        if self._optimizer is not None:
            for group, (first, last) in zip(self._optimizer.param_groups, self._places, strict=True):
                group["lr"] = push.lr
                group["params"][0].grad = vector[first:last]
            self._optimizer.step()
        if len(self._averages):
            keep = self.layout.keep**push.steps
            self._averages.mul_(keep).add_(vector[-len(self._averages) :], alpha=(1 - keep) / push.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that decides what the shard does next."""
        with self._lock:
            optimizer = self._optimizer.state_dict()["state"] if self._optimizer is not None else {}
            return {
                "weights": self._weights.clone(),
                "optimizer": {
                    key: {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
                    for key, state in optimizer.items()
                },
                "applied": dict(self._applied),
                "version": self.version,
                "shares": self.shares,
                "samples": self.samples,
                "refused": self.refused,
                "staleness": dict(self.staleness),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        with self._lock:
            self._weights.copy_(state["weights"])
            if self._optimizer is not None:
                groups = self._optimizer.state_dict()["param_groups"]
                self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
            self._applied = dict(state["applied"])
            self.version = state["version"]
            self.shares, self.samples, self.refused = state["shares"], state["samples"], state["refused"]
            self.staleness = Counter(state["staleness"])


def _optimizer(layout: Layout, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    rule = layout.rule
    if rule.name == "adagrad":
        return torch.optim.Adagrad(groups, lr=1.0, eps=rule.eps)
    assert rule.name == "sgd", rule.name
    return torch.optim.SGD(groups, lr=1.0, momentum=rule.momentum, nesterov=rule.nesterov)
