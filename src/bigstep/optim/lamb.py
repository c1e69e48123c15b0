"""LAMB: Adam's direction, scaled for each layer by the norms of its weights and of that direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bigstep.gpu.chunks import why_not_kernels
from bigstep.gpu.lamb import LambKernels, LambSettings
from bigstep.optim.multi_tensor import MultiTensorOptimizer

__all__ = ["LAMB", "lamb"]

SETTINGS = ("lr", "betas", "eps", "weight_decay", "adapt")
"""The settings of a parameter group; torch adds other names to a group."""


class LAMB(MultiTensorOptimizer):
    """Layer-wise adaptive moments for batch training.

    ::

        m <- beta1 * m + (1 - beta1) * g            m_hat = m / (1 - beta1^t)
        v <- beta2 * v + (1 - beta2) * g^2          v_hat = v / (1 - beta2^t)
        u = m_hat / (sqrt(v_hat) + eps) + weight_decay * w
        w <- w - lr * |w| / |u| * u                 the ratio is 1 if |w| or |u| is 0

    A parameter group with `adapt=False` uses the ratio 1, which is AdamW; `parameter_groups` makes such a group of
    biases and norm parameters. All norms are computed together and stay on the device, so the host never waits for
    them. On a CUDA device a step is four launches, and may be part of a whole-step graph. Gradients are not changed.

    Args:
        params: Parameters or groups of them.
        lr: Length of a layer's step relative to its weights, a float or a 0-dim tensor; it may change between steps.
        betas: Factors of the old averages, of the gradient and of its square, in the new ones.
        eps: Added to the root of the second average.
        weight_decay: Decay, which counts in the direction and its norm.

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))  # |w| = 5
    >>> optimizer = LAMB([weight], lr=0.1)
    >>> for scale in (1.0, 1000.0):  # whatever the size of the gradient, a step is a tenth of the weights' norm
    ...     before = weight.detach().clone()
    ...     weight.grad = scale * torch.tensor([[1.0, 1.0]])
    ...     _ = optimizer.step()
    ...     print(round(float((weight.detach() - before).norm() / before.norm()), 4))
    0.1
    0.1

    Reference: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2019, Algorithm 2.

    Differs from the paper: phi, which may bound |w|, is the identity, as in the authors' experiments. Groups that are
    not adapted, and the ratio 1 at a zero norm, are additions that public implementations agree on.
    """

    has_kernels = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        """See the class."""
        betas = tuple(betas) if isinstance(betas, list) else betas
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True}
        super().__init__(params, settings)

    def _update(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        lamb(params, grads, *self._lists(params), **{name: group[name] for name in SETTINGS})

    def _buffers(self, group: Mapping[str, Any], param: Tensor) -> list[Tensor]:
        return [*self._zeros(param, "exp_avg", "exp_avg_sq"), self._count(param)]

    def _kernels(
        self, params: Sequence[Tensor], copies: Sequence[Tensor | None] | None, narrow: torch.dtype
    ) -> LambKernels | None:
        averages, squares, steps = self._lists(params)
        if why_not_kernels(params, averages, squares) is not None:
            return None
        settings = [LambSettings(**one) for one in self._each(params, "weight_decay", "adapt", "betas", "eps")]
        return LambKernels(params, averages, squares, steps, settings, copies=copies, narrow=narrow)


@torch.no_grad()
def lamb(
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adapt: bool,
) -> None:
    """Update `params` and their state in place, all tensors together; they share one device and dtype.

    Equal to `bigstep.gpu.lamb.lamb_twin`, which is the specification; the arguments are those of `LAMB`.

    >>> w, m, v, t = torch.ones(4), torch.zeros(4), torch.zeros(4), torch.zeros(())
    >>> settings = dict(lr=0.25, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0, adapt=True)
    >>> lamb([w], [torch.ones(4)], [m], [v], [t], **settings)
    >>> w
    tensor([0.7500, 0.7500, 0.7500, 0.7500])
    """
    torch._foreach_add_(steps, 1)
    updates = _directions(grads, averages, squares, steps, betas, eps)
    torch._foreach_add_(updates, params, alpha=weight_decay)
    if adapt:
        weight_norms = torch.stack(torch._foreach_norm(params))
        update_norms = torch.stack(torch._foreach_norm(updates))
        ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
        torch._foreach_mul_(updates, (lr * ratios).unbind())
    else:
        torch._foreach_mul_(updates, lr)
    torch._foreach_sub_(params, updates)


def _directions(
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    betas: tuple[float, float],
    eps: float,
) -> list[Tensor]:
    """Update the averages with the gradients and return Adam's direction."""
    if averages[0].device.type == "cpu" and averages[0].dtype in (torch.float32, torch.float64):
        # on a CPU, torch's list operations go tensor by tensor; its fused AdamW passes over memory once, and one step
        # of it from 0 with rate -1 is the direction
        updates = [torch.zeros_like(average) for average in averages]
        grads = [
            grad if grad.stride() == average.stride() else torch.empty_like(average).copy_(grad)  # it ignores strides
            for grad, average in zip(grads, averages, strict=True)
        ]
        torch._fused_adamw_(updates, grads, averages, squares, [], steps, lr=-1.0, beta1=betas[0], beta2=betas[1],
                            weight_decay=0.0, eps=eps, amsgrad=False, maximize=False)  # fmt: skip
        return updates
    torch._foreach_lerp_(averages, grads, 1 - betas[0])
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, grads, grads, value=1 - betas[1])
    count = torch.stack(steps).double()  # beta^t is near 1 at first: in fp32 the difference would have four digits
    first, second = ((1 - beta**count).to(averages[0].dtype).unbind() for beta in betas)
    updates = list(torch._foreach_div(averages, first))
    roots = torch._foreach_sqrt(torch._foreach_div(squares, second))
    torch._foreach_add_(roots, eps)
    torch._foreach_div_(updates, roots)
    return updates
