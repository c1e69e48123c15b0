"""Steps on one GPU as CUDA graphs, the update included."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bigstep.data.sampler import Step
from bigstep.engine.learner import Learner
from bigstep.engine.methods.base import Note
from bigstep.engine.methods.eager import weigh
from bigstep.engine.methods.parallel import Debt
from bigstep.engine.state import Carried
from bigstep.gpu import GraphedStep
from bigstep.gpu.loss_scale import LossScale

__all__ = ["Graphed"]


class Graphed:
    """The pass of a rank that has a GPU to itself.

    A step whose batch fits one forward is one graph. A larger batch, and the incomplete last one of an epoch, is
    computed in parts without a graph, where the host is not the bottleneck.
    """

    gives_mean = True
    own_weight = 1.0
    steady = True

    def __init__(
        self,
        learner: Learner,
        precision: str,
        scale: LossScale,
        *,
        clip: float = 0.0,
        compiled: bool = False,
        emulate: bool = False,
    ):
        """Args:
        learner: What is trained.
        precision: As the configuration names it.
        scale: Of the loss.
        clip: The largest norm of a gradient, all parameters together; 0 for none.
        compiled: Let torch compile what is captured.
        emulate: Run on a CPU, with a tape in place of a graph.
        """
        if hasattr(learner.optimizer, "process_group"):  # that of the ranks that shared the steps before these
            learner.optimizer.process_group = None
        self.graphs = GraphedStep(
            learner.model,
            learner.objective.loss,
            learner.optimizer,
            precision=precision,
            scale=scale,
            clip=clip or None,
            compiled=compiled,
            emulate=emulate,
        )
        names: dict[Tensor, str] = {parameter: name for name, parameter in learner.objective.named_parameters()}
        self._names = [names.get(parameter, "") for parameter in self.graphs.params]  # in the order of the optimizer
        self._debt = Debt()
        self._gathering = False
        self.counts = 1.0

    def add(self, inputs: Any, target: Any, weight: float, *, last: bool, keep: bool) -> Tensor:
        """Replay a whole step, or add one part of it."""
        if weight == self.counts == 1 and not self._debt.open:
            return self.graphs(inputs, target)
        self._gathering = True
        return self.graphs.add(inputs, target, weight) * weight

    def own_gradients(self) -> list[Tensor | None]:
        """There are no other ranks."""
        return self.gradients()

    def gradients(self) -> list[Tensor | None]:
        """Return what the parts of a step have added up."""
        return list(self.graphs.gathered)

    @property
    def loss_scale(self) -> Tensor | float:
        """The scale of fp16's loss, on the device."""
        return self.graphs.scale

    def complete(self, step: Step, inputs: Any) -> bool:
        """Add what former ranks still owed; whether the gradient is finite is decided on the device."""
        if self._debt.open:
            self._debt.pay(dict(zip(self._names, self.graphs.gathered, strict=True)))
        return True

    def update(self) -> None:
        """Update with the sum of the parts; a graph has updated already."""
        if self._gathering:
            if self.counts != 1:
                weigh(self.graphs.gathered, self.counts)
            self.graphs.update()
            self._gathering = False

    def flush(self) -> None:
        """Nothing is in flight."""

    def ended(self) -> tuple[Note, ...]:
        """There is nothing to try out."""
        return ()

    def traffic(self) -> tuple[float, float]:
        """Nothing is exchanged."""
        return 0.0, 0.0

    def guard(self) -> contextlib.AbstractContextManager[object]:
        """There is no exchange that could fail."""
        return contextlib.nullcontext()

    def renew(self) -> None:
        """Rewrite the low-precision copies of the weights."""
        self.graphs.refresh()

    def rehearse(self) -> None:
        """Run the forward and backward of the newest graph without the graph."""
        self.graphs.rehearse()

    def parts(self) -> Mapping[str, Carried]:
        """Return the loss scale, and what former ranks still owe."""
        return {"scaler": self.graphs.loss_scale, "exchange": self._debt}

    def close(self) -> None:
        """Free the memory of the graphs."""
        self.graphs.close()
