"""Batch norm + ReLU (+ residual, + max-pool) in plain torch: the specification of the Triton kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor

__all__ = ["affine_by_group", "evaluated", "merged_running"]


def affine_by_group(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each group of samples with its own statistics; differentiable.

    ::

        z = (x - mean_g) / sqrt(var_g + eps) * weight + bias       var_g: biased, over the samples and pixels of group g

    Statistics and z are computed in fp32 (in float64 for float64 input).

    Returns:
        z in the precision of the statistics, and each group's mean and unbiased variance, of shape (groups, channels).

    >>> x = torch.tensor([1.0, 3.0, 10.0, 30.0]).view(4, 1, 1, 1)
    >>> z, mean, var = affine_by_group(x, torch.ones(1), torch.zeros(1), groups=2, eps=0.0)
    >>> z.flatten().tolist(), mean.flatten().tolist(), var.flatten().tolist()
    ([-1.0, 1.0, -1.0, 1.0], [2.0, 20.0], [2.0, 200.0])
    """
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    n, c, h, w = x.shape
    grouped = x.to(exact).reshape(groups, n // groups, c, h, w)
    var, mean = torch.var_mean(grouped, dim=(1, 3, 4), correction=0, keepdim=True)
    z = (grouped - mean) * torch.rsqrt(var + eps) * weight.view(1, 1, c, 1, 1) + bias.view(1, 1, c, 1, 1)
    count = grouped.numel() // (groups * c)
    return z.view(n, c, h, w), mean.view(groups, c), var.view(groups, c) * (count / (count - 1))


@torch.no_grad()
def merged_running(running: Tensor | None, each: Tensor, momentum: float) -> None:
    """Move a running buffer toward the mean over groups: running += momentum * (mean(each) - running).

    >>> buffer = torch.zeros(1)
    >>> merged_running(buffer, torch.tensor([[1.0], [3.0]]), momentum=0.5)
    >>> buffer
    tensor([1.])
    """
    if running is not None:
        running.lerp_(each.mean(0).to(running.dtype), momentum)


def evaluated(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Batch norm with given statistics, as at evaluation.

    >>> evaluated(torch.ones(1, 1, 1, 1), torch.ones(1), torch.ones(1), torch.zeros(1), torch.ones(1), 3.0).item()
    1.5
    """
    return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)
