"""AdaGrad as 1-bit SGD uses it: AdaGrad normalises the gradient, then momentum SGD steps along it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from bigstep.optim.multi_tensor import MultiTensorOptimizer, descend

__all__ = ["AdaGradSGD", "RankAdaGrad"]


class AdaGradSGD(MultiTensorOptimizer):
    """Momentum SGD on a gradient that AdaGrad has divided by the root of the sum of its past squares.

    ::

        g <- g + weight_decay * w
        s <- s + g^2,    n = g / (sqrt(s) + eps)
        v <- momentum * v + n
        w <- w - lr * v        (nesterov: w - lr * (n + momentum * v))

    Args:
        params: Parameters or groups of them.
        lr: Rate, a float or a 0-dim tensor; it may change between steps.
        momentum: Factor of the old v in the new one; with 0 this is torch's Adagrad.
        nesterov: Use Nesterov momentum.
        eps: Added to the root.
        weight_decay: L2 decay, added to the gradient first.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> optimizer = AdaGradSGD([weight], lr=0.1, momentum=0.0)
    >>> weight.grad = torch.tensor([0.5, -100.0])  # the first step of every element is as long as the rate
    >>> _ = optimizer.step()
    >>> [round(value, 4) for value in weight.tolist()]
    [-0.1, 0.1]

    Reference: Duchi, Hazan, Singer, Adaptive Subgradient Methods, 2011; Seide et al., 1-Bit Stochastic Gradient
    Descent, 2014, section 3 (AdaGrad on the aggregate, then momentum).

    Differs from the paper: every rank updates all weights, whereas in the paper each node updates its stripe before the
    second quantisation; the paper does not give its eps and momentum.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        *,
        nesterov: bool = False,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """See the class."""
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)

    def _update(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        squares, *momenta = self._lists(params)
        steps = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))  # new: gradients must not change
        torch._foreach_addcmul_(squares, steps, steps)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(steps, roots)
        if group["momentum"]:
            (velocities,) = momenta
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, steps)
            if group["nesterov"]:
                torch._foreach_add_(steps, velocities, alpha=group["momentum"])
            else:
                steps = velocities
        descend(params, steps, group["lr"])

    def _buffers(self, group: Mapping[str, Any], param: Tensor) -> list[Tensor]:
        return self._zeros(param, *(("square_sum", "momentum_buffer") if group["momentum"] else ("square_sum",)))


class RankAdaGrad:
    """AdaGrad on each rank's own gradient, before the exchange; momentum SGD is to follow it.

    ::

        g_r <- g_r + weight_decay * w
        s_r <- s_r + g_r^2,    g_r <- g_r / (sqrt(s_r) + eps)        on each rank r; then the mean over ranks

    An element that is not finite does not change its s_r, so that a skipped step does no lasting harm.

    Args:
        model: Gives the names of the parameters.
        groups: Parameter groups with their `weight_decay`; the optimizer must not apply it again.
        eps: Added to the root.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> adagrad = RankAdaGrad(model, [{"params": [model.weight], "weight_decay": 0.0}])
    >>> gradient = torch.tensor([[3.0, -100.0]])
    >>> adagrad(model.weight, gradient)
    >>> gradient
    tensor([[ 1., -1.]])

    Reference: Seide et al., 1-Bit Stochastic Gradient Descent, 2014, section 3 (AdaGrad on partial gradients, before
    quantisation: a lower training accuracy than after aggregation, the same word error rate).

    Differs from the paper: none known; the paper does not give its eps.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Mapping[str, Any]], eps: float = 1e-8) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._decay: dict[Tensor, float] = {
            parameter: group["weight_decay"] for group in groups for parameter in group["params"]
        }
        self._eps = eps
        self._squares: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, parameter: Tensor, gradient: Tensor) -> None:
        """Scale this rank's gradient of a parameter in place; call it once a step."""
        gradient.add_(parameter, alpha=self._decay[parameter])
        name = self._names[parameter]
        if name not in self._squares:
            self._squares[name] = torch.zeros_like(gradient)
        square = self._squares[name].to(gradient.device)  # a loaded one is on the CPU
        self._squares[name] = square
        square.add_(torch.where(gradient.isfinite(), gradient.square(), 0.0))
        gradient.div_(square.sqrt().add_(self._eps))

    def state_dict(self) -> dict[str, Tensor]:
        """The summed squares by parameter name, copied to the CPU."""
        return {name: square.to("cpu", copy=True) for name, square in self._squares.items()}

    def load_state_dict(self, states: Sequence[Mapping[str, Tensor]], rank: int, ranks: int) -> None:
        """Continue from the states of all ranks, in order.

        If the number of ranks is the same, each takes its own state. Otherwise all take the mean: each s_r estimates
        the same sum of squares, and the new ranks have no better estimate.
        """
        if len(states) == ranks:
            self._squares = {name: square.clone() for name, square in states[rank].items()}
        else:
            self._squares = {name: _mean(state[name] for state in states) for name in states[0]}


def _mean(tensors: Iterable[Tensor]) -> Tensor:
    stacked = torch.stack(list(tensors))
    return stacked.double().mean(0).to(stacked.dtype)
