"""What a step works on: a model with its loss, the rule that updates it, and the statistics of its batch norms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.errors import ConfigError
from bigstep.norm import WorkerStatistics
from bigstep.optim import RankAdaGrad

__all__ = ["Learner", "Loss", "WorkerLoss", "keep_kernels"]

Loss = Callable[[Any, Any], Tensor]
"""(output, target) -> the mean loss over what a forward counts: its samples, or its tokens."""


class WorkerLoss(nn.Module):
    """Model and loss as one module, so that DDP sees one forward, whatever the rank has to compute."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model, self.loss = model, loss
        self.unused: set[str] = set()
        """Names of parameters that no forward uses, if several ranks have looked for them."""

    def forward(self, inputs: Any, target: Any, weight: float) -> Tensor:
        """Return the weighted mean loss; with `inputs` None, a zero that depends on every weight that is used.

        The zero lets a rank without samples take part in the exchange: its gradient is 0, and no rank waits for it. A
        forward without any target that counts returns it too: many losses would be a mean over nothing, which is NaN.
        """
        if inputs is not None and weight:
            loss = self.loss(self.model(inputs), target)
            is_number = isinstance(loss, Tensor) and loss.numel() == 1
            if not is_number or (torch.is_grad_enabled() and not loss.requires_grad):
                raise ConfigError(_why_no_loss(loss))
            return loss * weight
        if inputs is not None:
            with torch.no_grad():
                self.model(inputs)  # so that its batch norms see the samples
        used = [p for name, p in self.named_parameters() if p.requires_grad and name not in self.unused]
        return torch.stack([parameter.sum() * 0 for parameter in used]).sum()


def _why_no_loss(loss: Any) -> str:
    """Say what a loss gave instead of one number that can be differentiated."""
    gave = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    if isinstance(loss, Tensor) and loss.numel() == 1:
        gave = "a number that depends on no weight (was it detached?)"
    return f"The loss gave {gave}, but it must give its mean over the samples, a tensor of one number with a gradient."


def keep_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer keep the kernels that it was made for, even when it loads a state from another device.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, fused=True)
    >>> keep_kernels(optimizer)
    >>> optimizer.load_state_dict(torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.2).state_dict())
    >>> optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["lr"]
    (True, 0.2)
    """

    def mend(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any] | None:
        groups = saved["param_groups"]
        if len(groups) != len(optimizer.param_groups):
            return None  # torch itself raises the error
        names = ("foreach", "fused", "capturable")
        kept = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
        return {**saved, "param_groups": [{**group, **own} for group, own in zip(groups, kept, strict=True)]}

    optimizer.register_load_state_dict_pre_hook(mend)


@dataclass(frozen=True)
class Learner:
    """One network in training."""

    model: nn.Module
    objective: WorkerLoss
    optimizer: torch.optim.Optimizer
    statistics: WorkerStatistics
    rank_adagrad: RankAdaGrad | None = None
    """Scales this rank's gradient before the exchange (optimizer.adagrad=before)."""

    @functools.cached_property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that a gradient moves, in the order of the model."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def clear(self) -> None:
        """Drop all gradients, even those of parameters that a user's own optimizer does not hold."""
        self.optimizer.zero_grad()
        for parameter in self.trained:
            parameter.grad = None
