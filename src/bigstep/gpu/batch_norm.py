"""Batch norm fused with the operations after it: ReLU, a residual, another branch's batch norm, the stem's max-pool.

Each function runs Triton kernels on a CUDA device and its twin in plain torch elsewhere. Each group of consecutive
samples has its own statistics: `groups=1` is ordinary batch norm, `groups=k` the batch norm of k workers in one call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor

from bigstep.errors import ConfigError
from bigstep.gpu.backend import why_not_triton
from bigstep.gpu.batch_norm_autograd import FusedNorm, FusedNormPool
from bigstep.gpu.batch_norm_twin import affine_by_group, evaluated, merged_running

__all__ = ["Norm", "batch_norm_relu", "fused_norm", "fused_norm_pool", "why_not_fused"]


class Norm(NamedTuple):
    """One batch norm: its parameters, its buffers and its settings."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    groups: int = 1
    momentum: float = 0.1
    eps: float = 1e-5
    training: bool = True


def why_not_fused(x: Tensor) -> str | None:
    """Return None if the kernels can take this input, else the reason in words.

    >>> why_not_fused(torch.zeros(1, 8, 2, 2))
    'the tensors are on cpu, not on a CUDA device'
    """
    if (reason := why_not_triton(x)) is not None:
        return reason
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernels take fp16, bf16 and fp32, not {x.dtype}"
    if x.shape[1] % 8:
        return f"{x.shape[1]} channels are not a multiple of 8"
    if not x.is_contiguous(memory_format=torch.channels_last):
        return "the tensor is not in channels_last"
    return None


def batch_norm_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None = None,
    *,
    relu: bool = True,
    groups: int = 1,
    momentum: float = 0.1,
    eps: float = 1e-5,
    training: bool = True,
) -> Tensor:
    """Batch norm, a residual and ReLU in one, with separate statistics for each group of samples.

    ::

        z = (x - mean_g) / sqrt(var_g + eps) * weight + bias + residual
        y = max(z, 0)
        running <- (1 - momentum) * running + momentum * (mean over groups of mean_g; of the unbiased var_g)

    On a CUDA device it takes channels_last tensors of fp16, bf16 or fp32, reads x twice and writes y once; statistics
    and sums are in fp32. The backward pass reads each tensor twice; only x is kept for it and, with a residual, one bit
    per element.

    Args:
        x: Samples x channels x height x width.
        weight: One factor per channel.
        bias: One summand per channel.
        running_mean: Buffer for evaluation, or None.
        running_var: Buffer for evaluation, or None.
        residual: Added before the ReLU; has the shape of x.
        relu: Whether negative values are set to zero.
        groups: Number of equal shares of consecutive samples, each with its own statistics.
        momentum: Weight of this batch in the buffers.
        eps: Added to the variance.
        training: False normalises with the buffers instead of the statistics of the batch.

    Returns:
        A tensor of x's shape and type.

    >>> x = torch.tensor([1.0, 3.0, 10.0, 30.0]).view(4, 1, 1, 1)
    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> batch_norm_relu(x, one, zero, None, None, groups=2, eps=0.0).flatten()  # each pair is normalised by itself
    tensor([0., 1., 0., 1.])

    Reference: Ioffe, Szegedy, Batch Normalization, 2015, Algorithm 1; statistics per worker as in Goyal et al.,
    Accurate, Large Minibatch SGD, 2017, section 2.3.

    Differs from the papers: the running buffers average over all groups, which no worker in the papers could see.
    """
    norm = Norm(weight, bias, running_mean, running_var, groups, momentum, eps, training)
    return fused_norm(x, norm, residual=residual, relu=relu)[0]


def fused_norm(
    x: Tensor,
    norm: Norm,
    *,
    residual: Tensor | None = None,
    other: Tensor | None = None,
    other_norm: Norm | None = None,
    relu: bool = True,
    fork: int = 0,
) -> tuple[Tensor, Tensor]:
    """`batch_norm_relu` with an optional second normalised branch and, on request, an output for each of two readers.

    ::

        y = max(norm(x) + residual + other_norm(other), 0)

    With `fork=1` the two returned tensors share their memory but have separate gradients, which the backward pass adds
    while it reads them; autograd would spend another pass over the tensor on the sum. With `fork=2` the second one
    holds only every second line and column, for a reader of stride 2 (the shortcut of a first block); so does its
    gradient.

    >>> x = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    >>> norm = Norm(torch.ones(1), torch.zeros(1), None, None, eps=0.0)
    >>> fused_norm(x, norm, other=-2 * x, other_norm=norm, relu=False)[0].flatten()
    tensor([0., 0.])
    """
    _check(x, norm)
    if norm.training and why_not_fused(x) is None:
        residual = None if residual is None else residual.contiguous(memory_format=torch.channels_last)
        other = None if other is None else other.contiguous(memory_format=torch.channels_last)
        weight2, bias2 = (None, None) if other_norm is None else (other_norm.weight, other_norm.bias)
        outputs: tuple[Tensor, Tensor] = FusedNorm.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            x, norm.weight, norm.bias, residual, other, weight2, bias2, norm, other_norm, relu, fork
        )
        return outputs if fork else (outputs[0], outputs[0])
    y = _plain_sum(x, norm, residual, other, other_norm, relu)
    return y, y[:, :, :: fork or 1, :: fork or 1]


def _plain_sum(
    x: Tensor, norm: Norm, residual: Tensor | None, other: Tensor | None, other_norm: Norm | None, relu: bool
) -> Tensor:
    """The twin of `fused_norm`."""
    z = _plain(x, norm)
    if residual is not None:
        z = z + residual
    if other is not None:
        assert other_norm is not None, "a second branch comes with its norm"
        z = z + _plain(other, other_norm)
    return (torch.relu(z) if relu else z).to(x.dtype)


def fused_norm_pool(x: Tensor, norm: Norm, *, fork: int = 0) -> tuple[Tensor, Tensor]:
    """Batch norm, ReLU and a 3x3 max-pool of stride 2 and padding 1 in one; `fork` as in `fused_norm`.

    >>> x = torch.arange(16.0).view(1, 1, 4, 4)
    >>> norm = Norm(torch.ones(1), torch.zeros(1), None, None)
    >>> fused_norm_pool(x, norm)[0].shape
    torch.Size([1, 1, 2, 2])
    """
    _check(x, norm)
    if norm.training and why_not_fused(x) is None:
        outputs: tuple[Tensor, Tensor] = FusedNormPool.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            x, norm.weight, norm.bias, norm, fork
        )
        return outputs if fork else (outputs[0], outputs[0])
    y = F.max_pool2d(torch.relu(_plain(x, norm)), 3, 2, 1).to(x.dtype)
    return y, y[:, :, :: fork or 1, :: fork or 1]


def _plain(x: Tensor, norm: Norm) -> Tensor:
    """The twin of the norm alone: z in fp32 (float64 for float64 input) in training, in x's type at evaluation."""
    if not norm.training:
        assert norm.running_mean is not None, "checked by _check"
        assert norm.running_var is not None, "checked by _check"
        return evaluated(x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
    z, mean, var = affine_by_group(x, norm.weight, norm.bias, norm.groups, norm.eps)
    merged_running(norm.running_mean, mean, norm.momentum)
    merged_running(norm.running_var, var, norm.momentum)
    return z


def _check(x: Tensor, norm: Norm) -> None:
    if x.dim() != 4:
        raise ConfigError(f"A batch norm was given {x.dim()} dimensions; it takes samples x channels x height x width.")
    if not norm.training:
        if norm.running_mean is None or norm.running_var is None:
            raise ConfigError(
                "A batch norm was given training=False without buffers; pass running_mean and running_var."
            )
        return
    if norm.groups < 1 or x.shape[0] % norm.groups:
        raise ConfigError(
            f"A batch norm was given {x.shape[0]} samples and groups={norm.groups}; groups must divide the samples."
        )
    if x.shape[0] // norm.groups * x.shape[2] * x.shape[3] < 2:
        raise ConfigError(
            f"A batch norm was given one value for each channel and group (shape {tuple(x.shape)}, groups="
            f"{norm.groups}); a variance needs at least two."
        )
