"""Steps whose gradient has the same bits on any number of ranks: every worker's is a part of one sum of integers.

A worker is one forward, wherever it runs; its gradient becomes integers as soon as it is there, and all of them, on all
ranks, are added up. A rank alone does the same arithmetic.
"""

from __future__ import annotations

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
from bigstep.exchange.codecs.piles import Pile, add_parts, take
from bigstep.exchange.hook import flat_gradient
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
        self._piles = [Pile(parameter.numel(), parts) for parameter in learner.trained]  # of a rank alone
        self._factor = 1.0  # the exchange gives the sum of all parts
        self.gives_mean = False  # behind a step there is no gradient of this rank to measure noise with

    def add(self, inputs: Any, target: Any, weight: float, *, last: bool, keep: bool) -> Tensor:
        """Run a forward and a backward, and add up its gradient unless the exchange has just done so."""
        loss = super().add(inputs, target, weight, last=last, keep=keep)
        if self._parallel is None:
            pairs = [
                (pile, p) for pile, p in zip(self._piles, self._learner.trained, strict=True) if p.grad is not None
            ]
            add_parts([pile for pile, _ in pairs], [flat_gradient(parameter) for _, parameter in pairs])
            self._learner.optimizer.zero_grad()
        elif not last:
            self._parallel.exchange.hold()
        return on_grid(loss)

    def complete(self, step: Step, inputs: Any) -> bool:
        """Take the sum of a rank alone; the rest is as for other passes."""
        if self._parallel is None:
            for pile, parameter in zip(self._piles, self._learner.trained, strict=True):
                parameter.grad = torch.empty_like(parameter)
                take(pile, flat_gradient(parameter))
        return super().complete(step, inputs)
