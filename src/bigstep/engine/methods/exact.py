"""Steps whose gradient has the same bits on any number of ranks: every worker's is a part of one sum of integers.

A worker is one forward, wherever it runs; its gradient becomes integers as soon as it is there, and all of them, on all
ranks, are added up. A rank alone does the same arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bigstep.data.sampler import Step
from bigstep.engine.learner import Learner
from bigstep.engine.measures import on_grid
from bigstep.engine.methods.eager import Eager
from bigstep.engine.methods.parallel import Parallel
from bigstep.engine.precision import Precision
from bigstep.engine.ranks import Ranks
from bigstep.exchange.codecs.piles import make_piles, take
from bigstep.exchange.piled import add_gradients, flat_gradient
from bigstep.gpu.loss_scale import LossScale

__all__ = ["ExactEager"]


class ExactEager(Eager):
    """`Eager` for a codec whose sum has no order.

    Args:
        learner: What is trained.
        ranks: Those that share it.
        precision: Of forwards.
        scale: Of the loss.
        parallel: The exchange with the other ranks, made for `parts`; None for a rank alone.
        parts: The most workers of any step.
        skip_nonfinite: Drop a step whose gradient is not finite, instead of ending the run.
        clip: The largest norm of a gradient, all parameters together; 0 for none.
    """

    def __init__(
        self,
        learner: Learner,
        ranks: Ranks,
        precision: Precision,
        scale: LossScale,
        parallel: Parallel | None,
        *,
        parts: int,
        skip_nonfinite: bool = False,
        clip: float = 0.0,
    ):
        super().__init__(learner, ranks, precision, scale, parallel, skip_nonfinite=skip_nonfinite, clip=clip)
        self._sizes = [parameter.numel() for parameter in learner.trained]
        self._piles = make_piles(self._sizes, parts, ranks.device)  # of a rank alone
        self._factor = 1.0  # the exchange gives the sum of all parts
        self.gives_mean = False  # behind a step there is no gradient of this rank to measure noise with

    def add(self, inputs: Any, target: Any, weight: float, *, last: bool, keep: bool) -> Tensor:
        """Run a forward and a backward, and add up its gradient unless the exchange has just done so."""
        loss = super().add(inputs, target, weight, last=last, keep=keep)
        if self._parallel is None:
            add_gradients(self._piles, self._learner.trained)
            self._learner.optimizer.zero_grad()
        elif not last:
            self._parallel.exchange.hold()
        return on_grid(loss)

    def complete(self, step: Step, inputs: Any) -> bool:
        """Take the sum of a rank alone; the rest is as for other passes."""
        if self._parallel is None:
            trained = self._learner.trained
            total = torch.empty(sum(self._sizes), dtype=_widest(trained), device=self._ranks.device)
            take(self._piles, total)
            for parameter, piece in zip(trained, total.split_with_sizes(self._sizes), strict=True):
                parameter.grad = torch.empty_like(parameter)
                flat_gradient(parameter).copy_(piece)
        return super().complete(step, inputs)


def _widest(tensors: Iterable[Tensor]) -> torch.dtype:
    """A type that has all values of these tensors' types."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
