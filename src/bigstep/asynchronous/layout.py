"""The network as one flat vector, divided among shards.

The vector that shards hold is the weights, parameter after parameter, and behind them the moving averages of batch
norm. The vector that replicas push has the same layout: gradients, and the statistics of their shares.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.asynchronous.averages import batch_statistics
from bigstep.config import OptimizerConfig
from bigstep.engine.build import Run
from bigstep.norm.statistics import copy_out, statistics_of, tracking_norms
from bigstep.validate import build

__all__ = ["CHUNK", "Layout", "gradient_vector", "load_vector", "weight_vector"]

CHUNK = 131_072
"""Elements that travel and are updated at once: 4 ms on a link of 1 Gbit/s, far more than a step of Python takes."""


@dataclass(frozen=True)
class Layout:
    """Plain values that every process of a Downpour run agrees on; they travel as JSON."""

    sizes: tuple[int, ...]
    """Elements of each parameter."""
    decays: tuple[float, ...]
    """Weight decay of each parameter."""
    averages: int
    """Elements of batch norm's moving averages."""
    shards: int
    dtype: str
    optimizer: dict[str, Any]
    keep: float
    """How much of a moving average is kept in one update."""
    max_staleness: int
    save_every: int
    """Updates between two checkpoints of a shard; 0 for the first one only."""
    keep_checkpoints: int
    chunk: int = CHUNK

    @classmethod
    def of(cls, run: Run, shares_per_epoch: float) -> Layout:
        """Describe the model and the server of a run."""
        config = run.config
        decay_of = {
            id(parameter): float(group["weight_decay"])
            for group in run.learner.optimizer.param_groups
            for parameter in group["params"]
        }
        parameters = list(run.learner.model.parameters())
        every = config.checkpoint.every * shares_per_epoch / config.asynchronous.push_every
        return cls(
            sizes=tuple(parameter.numel() for parameter in parameters),
            decays=tuple(decay_of[id(parameter)] for parameter in parameters),
            averages=batch_statistics(run.learner.model).numel(),
            shards=config.asynchronous.shards,
            dtype=config.arithmetic.weights,
            optimizer=dataclasses.asdict(config.optimizer),
            keep=run.learner.statistics.keep,
            max_staleness=config.asynchronous.max_staleness,
            save_every=max(1, round(every)) if config.checkpoint.every else 0,
            keep_checkpoints=config.checkpoint.keep,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "sizes": tuple(fields["sizes"]), "decays": tuple(fields["decays"])})

    def to_json(self) -> str:
        """Write as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """Elements of the whole vector."""
        return self.parameters + self.averages

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the weights."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def rule(self) -> OptimizerConfig:
        """The update rule of the shards."""
        return build(OptimizerConfig, self.optimizer, "optimizer")

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return the places [start, stop) of a shard; the sizes of shards differ by one element at most."""
        return self.size * shard // self.shards, self.size * (shard + 1) // self.shards

    def chunks(self, shard: int) -> list[tuple[int, int]]:
        """Return the places [start, stop), within a shard, of the chunks in which it is exchanged; at least one."""
        start, stop = self.bounds(shard)
        size = stop - start
        return [(first, min(first + self.chunk, size)) for first in range(0, max(size, 1), self.chunk)]

    def pieces(self, shard: int) -> list[tuple[int, int, float]]:
        """Return the parts of parameters that a shard holds: [start, stop) within the shard, and their decay."""
        start, stop = self.bounds(shard)
        pieces, offset = [], 0
        for size, decay in zip(self.sizes, self.decays, strict=True):
            first, last = max(offset, start), min(offset + size, stop)
            if first < last:
                pieces.append((first - start, last - start, decay))
            offset += size
        return pieces


def weight_vector(model: nn.Module) -> Tensor:
    """Return the weights and averages of a model as one vector on the CPU."""
    parts = [parameter.detach().reshape(-1) for parameter in model.parameters()]
    return torch.cat([*parts, batch_statistics(model).to(parts[0])]).cpu()


def gradient_vector(model: nn.Module) -> Tensor:
    """Return the gradients and the statistics of the last share as one vector on the CPU."""
    parts = [
        (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach().reshape(-1)
        for parameter in model.parameters()
    ]
    return torch.cat([*parts, batch_statistics(model).to(parts[0])]).cpu()


@torch.no_grad()
def load_vector(model: nn.Module, vector: Tensor) -> None:
    """Write a vector of weights and averages into a model."""
    offset = 0
    for parameter in model.parameters():
        parameter.copy_(vector[offset : offset + parameter.numel()].view_as(parameter))
        offset += parameter.numel()
    buffers = statistics_of(tracking_norms(model))
    copy_out(vector[offset:].to(buffers[0].device) if buffers else vector[offset:], buffers)
