"""What the processes of one machine share: the weights, the averages of batch norm, and counters of updates."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from bigstep.asynchronous.averages import batch_statistics, set_averages
from bigstep.engine.learner import Learner

__all__ = ["Board", "WriteFacts", "adopt_state", "shared_state"]


@dataclass(frozen=True)
class WriteFacts:
    """How an update fell among others: how many came between its read and its write, and whether writes overlapped."""

    staleness: int
    overlapped: bool


@dataclass
class Board:
    """Shared by all processes: a tensor here is the same memory everywhere.

    Each replica counts the writes that it began and ended in its own column, so no counter is written by two; the sum
    of the ended ones is the version of the weights. Two writes overlapped if one began before the other had ended;
    then a sum may have been lost, since `w += d` is a read and a write.
    """

    model: nn.Module
    """Its parameters are shared; its buffers are copied by each process."""
    averages: Tensor
    """Moving averages of batch norm: all means, then all variances."""
    state: list[dict[str, Tensor]] | None
    """The optimizer's state where it is shared (locked); None where each process has its own (hogwild)."""
    begun: Tensor
    ended: Tensor
    lock: Any
    """Held from the read to the write (locked); None for Hogwild!."""

    @classmethod
    def of(cls, learner: Learner, replicas: int, *, locked: bool) -> Board:
        """Lay out a copy of the weights in shared memory (or, on a GPU, in memory that IPC can open)."""
        return cls(
            model=copy.deepcopy(learner.model).share_memory(),
            averages=_share(batch_statistics(learner.model)),
            state=shared_state(learner.optimizer) if locked else None,
            begun=_share(torch.zeros(replicas, dtype=torch.int64)),
            ended=_share(torch.zeros(replicas, dtype=torch.int64)),
            lock=multiprocessing.get_context("spawn").Lock() if locked else None,
        )

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Hold this from the read of the weights to their update."""
        return contextlib.nullcontext() if self.lock is None else self.lock

    @property
    def version(self) -> int:
        """Updates so far."""
        return int(self.ended.sum())

    def write(self, replica: int, read_at: int, update: Callable[[], Any]) -> WriteFacts:
        """Make an update that was computed on weights of version `read_at`; return how it fell among the others."""
        begun, ended = self.begun.tolist(), self.ended.tolist()
        others = [other for other in range(len(begun)) if other != replica]
        self.begun[replica] += 1
        update()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()  # the write has ended when the kernels have
        began = self.begun.tolist()
        self.ended[replica] += 1
        return WriteFacts(
            staleness=sum(ended) - read_at,
            overlapped=any(begun[other] > ended[other] or began[other] > begun[other] for other in others),
        )

    @torch.no_grad()
    def copy_into(self, learner: Learner) -> None:
        """Load a snapshot of the shared weights and averages; with a lock, between two updates."""
        with self.turn():
            for mine, shared in zip(learner.model.parameters(), self.model.parameters(), strict=True):
                mine.copy_(shared)
            averages = self.averages.clone()
        set_averages(learner, averages)


@torch.no_grad()
def shared_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Return an optimizer's initial state, all zero, in shared memory: one dict per parameter.

    Optimizers make their state in the first step, so one step is taken with a gradient of zero, and undone.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for parameter, old in zip(parameters, before, strict=True):
        parameter.copy_(old)
    return [
        {
            key: _share(torch.zeros_like(value))
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        for parameter in parameters
    ]


def _share(tensor: Tensor) -> Tensor:
    shared: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return shared


def adopt_state(optimizer: torch.optim.Optimizer, state: list[dict[str, Tensor]]) -> None:
    """Make an optimizer work on shared state; its parameters must come in the same order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, shared in zip(parameters, state, strict=True):
        if shared:
            optimizer.state[parameter] = dict(shared)
