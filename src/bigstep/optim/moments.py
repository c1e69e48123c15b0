"""Adam's two moments, which LAMB and the rest of Muon share."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["adam_directions"]


def adam_directions(
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
) -> list[Tensor]:
    """Count a step, update both moments in place, and return new tensors m_hat / (sqrt(v_hat) + eps).

    ::

        m <- beta1 * m + (1 - beta1) * g            m_hat = m / (1 - beta1^t)
        v <- beta2 * v + (1 - beta2) * g^2          v_hat = v / (1 - beta2^t)

    >>> m, v, t = torch.zeros(2), torch.zeros(2), torch.zeros(())
    >>> adam_directions([torch.tensor([2.0, -0.5])], [m], [v], [t], betas=(0.5, 0.75), eps=0.0)
    [tensor([ 1., -1.])]
    """
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(averages, grads, 1 - betas[0])
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, grads, grads, value=1 - betas[1])
    count = torch.stack(
        steps
    ).double()  # beta^t is near 1 in the first steps: in fp32 the difference would have four digits
    first, second = ((1 - beta**count).to(averages[0].dtype).unbind() for beta in betas)
    directions = list(torch._foreach_div(averages, first))
    roots = torch._foreach_sqrt(torch._foreach_div(squares, second))
    torch._foreach_add_(roots, eps)
    torch._foreach_div_(directions, roots)
    return directions
