"""Forward and backward as torch runs them, gradients exchanged inside the last backward of a step.

Each rank multiplies the weights of its forwards by the number of ranks and the exchange takes the mean over ranks, so
every sample (or token) counts the same, in a full batch and in the incomplete last one of an epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bigstep.data.sampler import Step
from bigstep.engine.diagnosis import gradients_are_finite, nonfinite_error
from bigstep.engine.learner import Learner
from bigstep.engine.methods.base import Note
from bigstep.engine.methods.parallel import Debt, Parallel
from bigstep.engine.precision import Precision
from bigstep.engine.ranks import Ranks
from bigstep.engine.state import Carried
from bigstep.gpu.loss_scale import LossScale

__all__ = ["Eager", "weigh"]


class Eager:
    """The pass of CPUs, of several ranks, and of everything that a graph cannot hold.

    Args:
        learner: What is trained.
        ranks: Those that share it.
        precision: Of forwards.
        scale: Of the loss.
        parallel: The exchange with the other ranks; None for a rank alone.
        skip_nonfinite: Drop a step whose gradient is not finite, instead of ending the run.
        clip: The largest norm of a gradient, all parameters together; 0 for none.
        share_update: Divide the work of an update among the ranks, if the optimizer can do so.
    """

    def __init__(
        self,
        learner: Learner,
        ranks: Ranks,
        precision: Precision,
        scale: LossScale,
        parallel: Parallel | None,
        *,
        skip_nonfinite: bool = False,
        clip: float = 0.0,
        share_update: bool = False,
    ):
        self._learner, self._ranks, self._precision, self._parallel = learner, ranks, precision, parallel
        self._skip, self._clip = skip_nonfinite, clip
        self._share_update = share_update and hasattr(learner.optimizer, "process_group")
        self._scale = scale
        self._factor = float(ranks.size)  # the exchange divides by the number of ranks
        self._debt = Debt()
        self._kept_behind_exchange = False
        self.counts = 1.0
        self.gives_mean = parallel is None or parallel.exchange.gives_the_mean

    def add(self, inputs: Any, target: Any, weight: float, *, last: bool, keep: bool) -> Tensor:
        """Run a forward and a backward."""
        learner, parallel = self._learner, self._parallel
        if inputs is None and parallel is None:
            return torch.zeros((), device=self._ranks.device)
        objective = parallel.ddp if parallel and last else learner.objective  # as in `no_sync`, with less overhead
        exchanged = parallel.exchange.steps if parallel and last else 0
        self._kept_behind_exchange = keep and last and parallel is not None
        if self._kept_behind_exchange and parallel:
            parallel.exchange.keep_own()  # after the backward there is only the mean over ranks
        with self._precision.autocast():
            weighted: Tensor = objective(inputs, target, weight * self._factor)
        self._scale.scale(weighted).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if parallel and last:
            parallel.require_complete(exchanged)
        return weighted.detach() / self._factor

    @property
    def own_weight(self) -> float:
        """What a forward's weight is multiplied by."""
        return self._factor

    def own_gradients(self) -> list[Tensor | None]:
        """Return what this rank's forwards have added so far, even after the exchange."""
        if not self._kept_behind_exchange:
            return self.gradients()
        assert self._parallel is not None
        own = self._parallel.exchange.take_own()
        return [own.get(parameter) for parameter in self._learner.trained]

    def gradients(self) -> list[Tensor | None]:
        """Return what lies in `.grad`."""
        return [parameter.grad for parameter in self._learner.trained]

    @property
    def loss_scale(self) -> Tensor | float:
        """The scale of fp16's loss."""
        return self._scale.value if self._scale.is_enabled() else 1.0

    def complete(self, step: Step, inputs: Any) -> bool:
        """Do to the gradient of a single rank what several do in their exchange, and check whether it is finite.

        If it is not, the run ends, or the gradient is cleared: without gradients an optimizer leaves the weights alone.
        On a GPU only `skip_nonfinite` checks every step, since a check waits for the device; the loss shows it later.
        """
        learner = self._learner
        if self._parallel is None:
            if learner.rank_adagrad is not None:
                for parameter in learner.trained:
                    if parameter.grad is not None:
                        learner.rank_adagrad(parameter, parameter.grad)
            if self._debt.open:
                self._debt.pay({name: p.grad for name, p in learner.objective.named_parameters()})
        if self._scale.is_enabled() or (self._ranks.device.type == "cuda" and not self._skip):
            return True
        if self._is_finite():
            return True
        if not self._skip:
            raise nonfinite_error(learner.model, inputs, self._ranks, step.position.step + 1, learner.optimizer)
        learner.clear()
        return False

    def _is_finite(self) -> bool:
        return gradients_are_finite(self._learner.trained)

    def update(self) -> None:
        """Scale and clip the gradient in `.grad`, update the weights with it, and clear it."""
        optimizer: Any = self._learner.optimizer
        parallel = self._parallel
        # residuals are scaled as well; otherwise the scale is not read, since on a GPU the host would wait for it
        carried = parallel.exchange if parallel and parallel.exchange.carries and self._scale.is_enabled() else None
        if self._share_update:
            optimizer.process_group = self._ranks.process_group  # islands: other ranks may have shared the last step
        counts = self.counts if parallel is None else parallel.counts_of(self.counts)
        if counts != 1:
            weigh(self.gradients(), counts)
        before = self._scale.get_scale() if carried else 1.0
        if self._clip:
            self._scale.unscale_(optimizer)  # the norm must be that of the unscaled gradient
            torch.nn.utils.clip_grad_norm_(self._learner.trained, self._clip, foreach=True)
        self._scale.step(optimizer)
        self._scale.update()
        self._learner.clear()
        if carried and (now := self._scale.get_scale()) != before:
            carried.rescale(now / before)

    def flush(self) -> None:
        """Double buffering: update with the gradient that was still in flight."""
        if self._parallel is not None and self._parallel.exchange.flush():
            self.update()

    def ended(self) -> tuple[Note, ...]:
        """Let the tuner of bucket sizes see the end of a step."""
        return () if self._parallel is None else self._parallel.ended()

    @property
    def steady(self) -> bool:
        """Whether the size of buckets is settled."""
        return self._parallel is None or self._parallel.steady

    def traffic(self) -> tuple[float, float]:
        """Ask the exchange."""
        exchange = self._parallel.exchange if self._parallel else None
        return (exchange.exposed_seconds, exchange.bytes_sent) if exchange else (0.0, 0.0)

    def guard(self) -> contextlib.AbstractContextManager[object]:
        """Ask the exchange."""
        return self._parallel.exchange.guard() if self._parallel else contextlib.nullcontext()

    def renew(self) -> None:
        """Nothing is derived from the weights."""

    def rehearse(self) -> None:
        """Do nothing: steps run outside graphs anyway."""

    def parts(self) -> Mapping[str, Carried]:
        """Loss scale, exchange, and the sums of AdaGrad in front of it."""
        exchange = self._debt if self._parallel is None else self._parallel
        parts: dict[str, Carried] = {"scaler": self._scale, "exchange": exchange}
        if self._learner.rank_adagrad is not None:
            parts["rank_adagrad"] = _AdaGradOfRanks(self._learner, self._ranks)
        return parts

    def close(self) -> None:
        """End the threads of the exchange."""
        if self._parallel is not None:
            self._parallel.exchange.close()


def weigh(gradients: Iterable[Tensor | None], counts: float) -> None:
    """Multiply gradients by `counts`, in place."""
    if held := [gradient for gradient in gradients if gradient is not None]:  # torch refuses empty lists
        torch._foreach_mul_(held, counts)


class _AdaGradOfRanks:
    """The sums that each rank scales its own gradient by."""

    def __init__(self, learner: Learner, ranks: Ranks):
        assert learner.rank_adagrad is not None
        self._adagrad, self._ranks = learner.rank_adagrad, ranks

    def state_dict(self) -> list[Any] | None:
        return self._ranks.to_first(self._adagrad.state_dict())

    def load_state_dict(self, state: list[Any]) -> None:
        self._adagrad.load_state_dict(state, self._ranks.rank, self._ranks.size)
