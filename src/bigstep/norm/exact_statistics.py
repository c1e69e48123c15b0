"""Batch-norm statistics whose mean over workers has the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bigstep.norm.statistics import statistics_of
from bigstep.norm.worker_statistics import WorkerStatistics

__all__ = ["ExactStatistics"]

AddUp = Callable[[Sequence[Tensor], Sequence[torch.Size]], Tensor]


class ExactStatistics(WorkerStatistics):
    """`WorkerStatistics` that are combined in every step, by a sum that does not depend on the order of its terms.

    The first rank then holds the whole average and the others zeros, so that the sum over ranks, which an evaluation or
    a checkpoint takes, leaves it unchanged.

    Args:
        model: Any module.
        keep: How much of the average is kept from step to step.
        add_up: Sums one flat tensor per worker over the workers of all ranks; every rank calls it in every step.
        first: Whether this rank is the first.
    """

    def __init__(self, model: nn.Module, keep: float, add_up: AddUp, *, first: bool) -> None:
        """See the class."""
        super().__init__(model, keep)
        self._add_up, self._first = add_up, first
        self._one = torch.ones(1, dtype=self._initial.dtype, device=self._initial.device)  # summed, it counts workers
        self._parts: list[Tensor] = []

    def begin_forward(self, seen: int, now: int) -> None:
        """Announce the worker of the next forward."""
        if seen == 0:
            self._parts = []
        super().begin_forward(seen, now)

    def end_step(self, share: float, filled: float = 1.0) -> None:
        """Update the average with the mean over all workers of the step."""
        if share > 0:
            self._collect()
        parts, self._parts, self._workers = self._parts if share > 0 else [], [], 0
        kept, added = self._weights(filled)
        self._decay *= kept
        if not self._norms:
            return
        shapes = [*(each.shape for each in statistics_of(self._norms)), self._one.shape]
        total = self._add_up(parts or [self._one.new_zeros(self._initial.numel() + 1)], shapes)
        if self._first:
            self._share.mul_(kept).add_(total[:-1] / total[-1], alpha=added)

    def _collect(self) -> None:
        """Keep the statistics of the worker that has just run."""
        if self._latest and self._norms:
            self._parts.append(torch.cat([*statistics_of(self._norms), self._one]))
        self._workers += self._latest
        self._latest = 0
