"""Evaluation statistics of a run with many logical workers: the mean over workers, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.errors import ConfigError
from bigstep.norm.statistics import copy_out, last_batch_statistics, statistics_of, tracking_norms

__all__ = ["WorkerStatistics"]


class WorkerStatistics:
    """The statistics an evaluation uses: the mean over all workers of the workers' own statistics.

    ::

        step   = mean over the workers active in a step of the (mean, variance) of their local batches
        global <- keep * global + (1 - keep) * step                      keep = 0: the last full batch alone

    A moving average is linear, so this is also the mean over workers of one moving average per worker, and no memory
    per worker is needed. It is linear in the ranks as well: each rank keeps its share of the average, and one sum over
    ranks completes it. So the result does not depend on how many ranks there are.

    The last batch of an epoch may hold only a fraction f of a full one, and its statistics come from few samples: its
    weight is f * (1 - keep), or 0 with keep = 0, which keeps the statistics of the last full batch.

    In a step, a rank calls `begin_forward` before each forward and `end_step` once; before an evaluation all ranks
    call `synchronize`, which leaves the averages here unchanged, so that evaluations do not affect later statistics.
    During training, the modules hold only the statistics of the last forward (their `momentum` is set to 1 and stays
    there, so that compiled and captured models stay valid, and a forward that activation checkpointing repeats counts
    once).

    Args:
        model: Any module; batch norms that keep running statistics are used, others left alone. With DDP,
            `broadcast_buffers` must be off: it would overwrite this rank's statistics.
        keep: How much of the average is kept from step to step: 0.9 for a slow average, 0 for the last batch only.

    >>> norm = nn.BatchNorm1d(1)
    >>> statistics = WorkerStatistics(norm, keep=0.5)
    >>> for seen, batch in enumerate(([[1.0], [3.0]], [[5.0], [7.0]])):  # two workers, local means 2 and 6
    ...     statistics.begin_forward(seen, now=1)
    ...     _ = norm(torch.tensor(batch))
    >>> statistics.end_step(share=1.0)
    >>> statistics.synchronize(lambda flat: flat)
    >>> norm.running_mean  # 0.5 * 0 + 0.5 * 4
    tensor([2.])

    Reference: Akiba, Suzuki, Fukuda, Extremely Large Minibatch SGD, 2017, section 3.3 (last batch, averaged); Goyal
    et al., Accurate, Large Minibatch SGD, 2017, section 5.1 (statistics per worker, moving average of 0.9).

    Differs from the papers: Goyal et al. and Yamazaki et al. evaluate with each worker's own moving averages; here
    these are averaged over all workers first. As in torch, variances are unbiased, averages start at mean 0 and
    variance 1, and a mean of variances leaves out the variance between the workers' means.
    """

    def __init__(self, model: nn.Module, keep: float) -> None:
        """See the class."""
        if not 0 <= keep < 1:
            raise ConfigError(f"WorkerStatistics was given keep={keep}, but it must be at least 0 and less than 1.")
        self.keep = keep
        self._norms = tracking_norms(model)
        last_batch_statistics(model)
        self._initial = self._gathered()  # what the average starts from, the same on every rank
        self._decay = 1.0  # the weight that it still has after the steps so far
        self._share = torch.zeros_like(self._initial)  # this rank's part of the steps so far
        self._step = torch.zeros_like(self._initial)  # sum over this rank's workers in the current step
        self._workers = 0  # how many of them are in that sum
        self._latest = 0  # workers of the forward whose statistics are still in the modules

    def restart(self) -> None:
        """Start over from the statistics in the modules."""
        self._initial = self._gathered()
        self._decay = 1.0
        self._share.zero_()
        self._step.zero_()
        self._workers = self._latest = 0

    def begin_forward(self, seen: int, now: int) -> None:
        """Announce the workers of the next forward; call it before each forward of a step.

        Args:
            seen: Workers of this rank that have already run in this step; 0 begins a step, and drops one that was
                begun but not ended.
            now: Workers in this forward: 1, or several through `GhostBatchNorm2d`.
        """
        if seen == 0:
            self._step.zero_()
            self._workers = 0
        else:
            self._collect()
        assert self._workers == seen, f"{self._workers} workers were run in this step, not {seen}"
        self._latest = now
        if self._norms:
            # at momentum 1 torch computes 0 * running + 1 * batch, so a NaN from a dropped step would stay
            torch._foreach_zero_(statistics_of(self._norms))

    def end_step(self, share: float, filled: float = 1.0) -> None:
        """Update the average with the statistics of a step.

        Args:
            share: Workers of this rank in the step / active workers of all ranks; 0 for a rank without workers.
            filled: Samples of the step / samples of a full batch.
        """
        kept, added = self._weights(filled)
        self._decay *= kept
        self._share.mul_(kept)
        if share > 0:
            self._collect()
            assert self._workers, "a step with a share must have had a forward"
            self._share.add_(self._step, alpha=added * share / self._workers)
            self._workers = 0

    def _weights(self, filled: float) -> tuple[float, float]:
        """Return the weights of the average so far and of a step in the next average."""
        if filled == 1:
            return self.keep, 1 - self.keep
        added = filled * (1 - self.keep) if self.keep else 0.0
        return 1 - added, added

    def synchronize(self, sum_over_ranks: Callable[[Tensor], object]) -> None:
        """Complete the averages over ranks and write them into the modules, the same on every rank.

        Every rank must call it, and all after the same step, since `sum_over_ranks` is a collective.

        Args:
            sum_over_ranks: Sums one flat tensor over the ranks in place; does nothing where there is one rank.
        """
        total = self._share.clone()
        if self._norms:  # the same on every rank, so none waits in a collective that others skip
            sum_over_ranks(total)
        self._latest = 0
        copy_out(total.add_(self._initial, alpha=self._decay), statistics_of(self._norms))

    def state_dict(self, *, first: bool = True) -> dict[str, Any]:
        """Return this rank's state; a checkpoint keeps those of all ranks.

        Args:
            first: Whether this is the first rank, whose state also holds what all ranks have in common.
        """
        own = {"share": self._share.clone()}
        return {"initial": self._initial.clone(), "decay": self._decay, **own} if first else own

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], rank: int = 0, ranks: int = 1) -> None:
        """Continue from a checkpoint: exactly on the same number of ranks, with the shares summed on another number.

        Args:
            states: The `state_dict` of every rank that wrote the checkpoint, in order.
            rank: This rank.
            ranks: Number of ranks now.
        """
        saved = states[0]
        if saved["initial"].shape != self._initial.shape:
            raise ConfigError(
                f"The checkpoint holds {saved['initial'].numel()} batch-norm statistics, but this model has "
                f"{self._initial.numel()}; load it into the model that it was saved from."
            )
        self._initial.copy_(saved["initial"])
        self._decay = float(saved["decay"])
        self._step.zero_()
        self._workers = self._latest = 0
        if len(states) == ranks:
            self._share.copy_(states[rank]["share"])
        else:  # only the sum over ranks counts: the first rank takes it all
            total = torch.stack([state["share"] for state in states]).sum(0)
            self._share.copy_(total if rank == 0 else torch.zeros_like(total))

    def _collect(self) -> None:
        """Add the statistics in the modules to the sum of the step."""
        if self._latest and self._norms:
            self._step.add_(torch.cat(statistics_of(self._norms)), alpha=self._latest)
        self._workers += self._latest
        self._latest = 0

    def _gathered(self) -> Tensor:
        return torch.cat(statistics_of(self._norms)) if self._norms else torch.zeros(0)
