"""Steps whose gradient has the same bits on any number of ranks: each worker's gradient is a part of one integer sum.

A worker is one forward, wherever it runs; its gradient is converted to integers at once, and those of all workers on
all ranks are added up. A single rank does the same arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bigstep.engine.learner import Learner
from bigstep.engine.measures import on_grid
from bigstep.engine.methods.eager import Eager
from bigstep.engine.methods.parallel import Parallel
from bigstep.engine.precision import Precision
from bigstep.engine.ranks import Ranks
from bigstep.exchange.codecs.levels import exponent_above
from bigstep.exchange.codecs.piles import make_piles
from bigstep.exchange.piled import add_gradients, in_order
from bigstep.gpu.loss_scale import LossScale

__all__ = ["ExactEager"]

_CALM, _ANY = 40, 10_000
"""Below 2^40 neither a gradient nor its squared norm comes near overflow; and an exponent above any other."""


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
        sizes = [parameter.numel() for parameter in learner.trained]
        self._piles = make_piles(sizes, parts, ranks.device)  # for a single rank
        self._parts, self._bound = parts, _ANY
        self._factor = 1.0  # the exchange gives the sum of all parts
        self._open = False  # whether the gradient of the last forward is still in `.grad` and not yet in the sum
        self.gives_mean = True

    def add(self, inputs: Any, target: Any, weight: float, *, last: bool, keep: bool) -> Tensor:
        """Run a forward and a backward; its gradient stays readable until the next, or has been exchanged."""
        self._settle()
        loss = super().add(inputs, target, weight, last=last, keep=keep)
        if last and self._parallel is None:
            self._take()
        self._open = not last
        return on_grid(loss)

    def _is_finite(self) -> bool:
        """Look at the gradients only if their levels do not bound them already."""
        bound = self._bound if self._parallel is None else self._parallel.exchange.exponent_above
        return bound < _CALM or super()._is_finite()

    def _settle(self) -> None:
        """Add the gradient of the last forward to the sum, as a part of its own."""
        if self._open and self._parallel is not None:
            self._parallel.exchange.hold()
        elif self._open:
            add_gradients(self._piles, self._learner.trained)
        self._open = False

    def _take(self) -> None:
        """Add the last gradient of a single rank, and leave the sum in `.grad`."""
        trained = self._learner.trained
        if all(parameter.grad is not None for parameter in trained):
            levels = self._piles.add_last([in_order(parameter) for parameter in trained])
        else:
            add_gradients(self._piles, trained)
            levels = self._piles.levels()
        if levels.device.type == "cpu":  # on a GPU the host would have to wait
            self._bound = exponent_above(int(levels[::2].max()), self._parts)
        gradients = [torch.empty_like(each) if each.grad is None else each.grad for each in trained]
        self._piles.take(gradients)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
