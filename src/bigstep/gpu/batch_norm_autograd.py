"""The fused batch norms as autograd functions over the Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bigstep.gpu import batch_norm_launch as launch

if TYPE_CHECKING:
    from bigstep.gpu.batch_norm import Norm

__all__ = ["FusedNorm", "FusedNormPool"]


def _statistics(x: Tensor, norm: Norm) -> Tensor:
    return launch.statistics(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.groups, norm.momentum, norm.eps
    )


def _gradients(gradients: tuple[Tensor | None, ...], shape: torch.Size) -> tuple[Tensor | None, Tensor | None]:
    """The gradients that are not None, in channels_last; the first one has the output's shape."""
    both = [g.contiguous(memory_format=torch.channels_last) for g in gradients if g is not None]
    if len(both) == 1 and both[0].shape != shape:  # only the subsampled output was used
        whole = torch.zeros(shape, dtype=both[0].dtype, device=both[0].device).to(memory_format=torch.channels_last)
        whole[:, :, ::2, ::2] = both[0]
        both = [whole]
    return (both[0] if both else None, both[1] if len(both) > 1 else None)


class FusedNorm(torch.autograd.Function):
    """max(norm(x) + residual + other_norm(other), 0): see `bigstep.gpu.batch_norm.fused_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        other: Tensor | None,
        other_weight: Tensor | None,
        other_bias: Tensor | None,
        norm: Norm,
        other_norm: Norm | None,
        relu: bool,
        fork: int,
    ) -> tuple[Tensor, ...]:
        """Three passes over x: one for the statistics, one read and one write to normalise."""
        stats = _statistics(x, norm)
        other_stats = None
        if other is not None:
            assert other_norm is not None, "a second branch comes with its norm"
            other_stats = _statistics(other, other_norm)
        # Without another summand the sign of the output can be recomputed from x; with one, a bit per element is kept.
        signs = relu and not (residual is None and other is None)
        y, bits, half = launch.normalize(x, stats, residual, other, other_stats, relu=relu, signs=signs, half=fork == 2)
        ctx.save_for_backward(x, stats, bits, other, other_stats, weight)
        ctx.relu, ctx.has_residual = relu, residual is not None
        ctx.set_materialize_grads(False)
        return (y, y.detach() if half is None else half) if fork else (y,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Two passes: the sums, then the gradients of x and of the other branch."""
        x, stats, bits, other, other_stats, weight = ctx.saved_tensors
        first, second = _gradients(gradients, x.shape)
        if first is None:
            return (None,) * 11
        rows = launch.shape_of(x, stats.shape[1]).rows
        write = bits is not None or second is not None
        partial, dz = launch.backward_sums(
            first, second, x, stats, other, other_stats, bits, relu=ctx.relu, write=write
        )
        coefficient, dweight, dbias = launch.coefficients(partial, stats, rows, 1, weight)
        other_coefficient = dweight2 = dbias2 = None
        if other is not None:
            other_coefficient, dweight2, dbias2 = launch.coefficients(partial, other_stats, rows, 2, weight)
        gradient = first if dz is None else dz
        dx, dother = launch.backward_input(
            gradient, x, stats, coefficient, other, other_stats, other_coefficient, mask=ctx.relu and dz is None
        )
        residual = gradient if ctx.has_residual else None
        return (dx, dweight, dbias, residual, dother, dweight2, dbias2, None, None, None, None)


class FusedNormPool(torch.autograd.Function):
    """maxpool(max(norm(x), 0)): see `bigstep.gpu.batch_norm.fused_norm_pool`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: Norm, fork: int) -> tuple[Tensor, ...]:
        """Two reads of x; only the pooled tensor is written."""
        stats = _statistics(x, norm)
        y, winner, picked = launch.pool(x, stats)
        ctx.save_for_backward(x, stats, winner, picked, weight)
        ctx.set_materialize_grads(False)
        return (y, y.detach()[:, :, ::fork, ::fork]) if fork else (y,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The sums need only the pooled tensors, since all other pixels have zero gradient; one pass writes dx."""
        x, stats, winner, picked, weight = ctx.saved_tensors
        first, second = _gradients(gradients, picked.shape)
        if first is None:
            return (None,) * 5
        partial, dz = launch.backward_sums(first, second, picked, stats, None, None, None, relu=True, write=True)
        assert dz is not None, "asked for with write=True"
        rows = launch.shape_of(x, stats.shape[1]).rows
        coefficient, dweight, dbias = launch.coefficients(partial, stats, rows, 1, weight)
        return (launch.unpool(dz, winner, x, stats, coefficient), dweight, dbias, None, None)
