"""LARS: a learning rate for each layer, from the norms of its weights and its gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bigstep.errors import ConfigError
from bigstep.gpu.chunks import why_not_kernels
from bigstep.gpu.lars import LarsKernels, LarsSettings
from bigstep.optim.multi_tensor import MultiTensorOptimizer

__all__ = ["LARS", "lars"]

SETTINGS = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps", "nesterov", "adapt")
"""The settings of a parameter group; torch adds other names to a group."""


class LARS(MultiTensorOptimizer):
    """Layer-wise adaptive rate scaling, as in Algorithm 1 of the paper: the rate is inside the velocity.

    ::

        lambda = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)      1 if |w| or |g| is 0
        v <- momentum * v + lr * lambda * (g + weight_decay * w)
        w <- w - v                                                               nesterov: w - (momentum * v + u),
                                                                                 where u is the term added to v

    A parameter group with `adapt=False` uses lambda = 1, which is momentum SGD; `parameter_groups` makes such a group
    of biases and norm parameters. All norms of a group are computed together and stay on the device, so the host never
    waits for them. Gradients are not changed.

    Args:
        params: Parameters or groups of them.
        lr: The global rate, a float or a 0-dim tensor; it may change in `param_groups` between steps.
        momentum: Factor of the old velocity in the new one.
        weight_decay: L2 decay, which counts in the gradient and in lambda.
        trust_coefficient: Size of a layer's step relative to its weights (eta of the paper).
        eps: Added to the denominator of lambda.
        nesterov: Use Nesterov momentum.

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))  # |w| = 5
    >>> optimizer = LARS([weight], lr=1.0, trust_coefficient=0.1, momentum=0.0, eps=0.0)
    >>> for scale in (1.0, 1000.0):  # whatever the size of the gradient, a step is a tenth of the weights' norm
    ...     before = weight.detach().clone()
    ...     weight.grad = scale * torch.tensor([[1.0, 0.0]])
    ...     _ = optimizer.step()
    ...     print(round(float((weight.detach() - before).norm() / before.norm()), 4))
    0.1
    0.1

    Reference: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, 2017, Algorithm 1.

    Differs from the paper: eps, lambda = 1 at a zero norm, groups that are not adapted, and Nesterov momentum are
    additions that public implementations agree on. With a scaled loss, unscale the gradients before the step: eps and
    the decay are not scaled with them.
    """

    has_kernels = True
    squares = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-9,
        nesterov: bool = False,
    ) -> None:
        """See the class."""
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "adapt": True,
        }
        super().__init__(params, defaults)

    def _require(self, group: Mapping[str, Any]) -> None:
        super()._require(group)
        trust = group["trust_coefficient"]
        fits = isinstance(trust, Real) and 0 < float(trust) < math.inf
        self._expect(group, "trust_coefficient", fits, "a finite number greater than 0")
        if group["nesterov"] and group["momentum"] == 0:
            raise ConfigError("LARS was given nesterov=True with momentum=0, but Nesterov momentum needs momentum > 0.")

    def _update(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        lars(params, grads, *self._lists(params), **{name: group[name] for name in SETTINGS})

    def _buffers(self, group: Mapping[str, Any], param: Tensor) -> list[Tensor]:
        return self._zeros(param, "momentum_buffer")

    def _kernels(
        self, params: Sequence[Tensor], copies: Sequence[Tensor | None] | None, narrow: torch.dtype
    ) -> LarsKernels | None:
        (velocities,), groups = self._lists(params), self.param_groups
        if why_not_kernels(params, velocities) is not None or len({(g["momentum"], g["nesterov"]) for g in groups}) > 1:
            return None
        each = self._each(params, "weight_decay", "adapt", "trust_coefficient", "eps")
        settings, group = [LarsSettings(**one) for one in each], groups[0]
        momentum, nesterov = group["momentum"], group["nesterov"]
        return LarsKernels(
            params, velocities, settings, momentum=momentum, nesterov=nesterov, copies=copies, narrow=narrow
        )


def lars(
    params: list[Tensor],
    grads: list[Tensor],
    velocities: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
    nesterov: bool,
    adapt: bool,
) -> None:
    """Update `params` and `velocities` in place, all tensors together; they share one device and dtype.

    Equal to `bigstep.gpu.lars.lars_twin`, which is the specification; the arguments are those of `LARS`.

    >>> weight, velocity = torch.ones(2, 2), torch.zeros(2, 2)
    >>> settings = dict(lr=1.0, momentum=0.9, weight_decay=0.0, eps=0.0, nesterov=False, adapt=True)
    >>> lars([weight], [torch.ones(2, 2)], [velocity], trust_coefficient=0.25, **settings)
    >>> weight
    tensor([[0.7500, 0.7500],
            [0.7500, 0.7500]])
    """
    updates = torch._foreach_add(grads, params, alpha=weight_decay)  # new tensors: gradients must not change
    if adapt:
        weight_norms = torch.stack(torch._foreach_norm(params))
        grad_norms = torch.stack(torch._foreach_norm(grads))
        trust = trust_coefficient * weight_norms / (grad_norms + weight_decay * weight_norms + eps)
        rates = lr * torch.where((weight_norms > 0) & (grad_norms > 0), trust, 1.0)
        torch._foreach_mul_(updates, rates.unbind())
    else:
        torch._foreach_mul_(updates, lr)
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_add_(velocities, updates)
    if nesterov:
        torch._foreach_add_(updates, velocities, alpha=momentum)
        torch._foreach_sub_(params, updates)
    else:
        torch._foreach_sub_(params, velocities)
