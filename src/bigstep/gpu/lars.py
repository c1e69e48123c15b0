"""LARS over all tensors of a model in three launches, whatever their number; `lars_twin` is its specification.

Weights and velocities are fp32; gradients may be fp32 or one lower precision; low-precision copies of the weights are
rewritten in the same pass. Rates, loss scale and the flag to skip are read on the device, so a CUDA graph can hold a
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bigstep.gpu.backend import on_device_of
from bigstep.gpu.chunks import WARPS, Chunks, on_device, why_not_kernels
from bigstep.gpu.tensor_lists import laid_out_like, narrow_type

__all__ = ["LarsKernels", "LarsSettings", "lars_step", "lars_twin"]


class LarsSettings(NamedTuple):
    """Settings of one tensor."""

    weight_decay: float = 0.0
    adapt: bool = True
    trust_coefficient: float = 0.001
    eps: float = 1e-9
    rate: int = 0
    """Which element of `lr` the tensor uses."""


class LarsKernels:
    """The tables of one set of tensors, and the three launches over them: a `GraphUpdate`.

    Args:
        params: fp32 weights, updated in place.
        velocities: fp32, laid out like the weights.
        settings: One entry for each tensor.
        momentum: Factor of the old velocity in the new one.
        nesterov: Use Nesterov momentum.
        copies: For each tensor its low-precision copy, or None; all of type `narrow`.
        narrow: The type of the copies, and of gradients that are not fp32.
    """

    in_graph = True

    def __init__(
        self,
        params: Sequence[Tensor],
        velocities: Sequence[Tensor],
        settings: Sequence[LarsSettings],
        *,
        momentum: float,
        nesterov: bool = False,
        copies: Sequence[Tensor | None] | None = None,
        narrow: torch.dtype = torch.float16,
    ) -> None:
        self.chunks = Chunks(params, [velocities], copies, narrow)
        self.momentum, self.nesterov = momentum, nesterov
        device = self.chunks.device
        rows = [[s.weight_decay, float(s.adapt), s.trust_coefficient, s.eps, float(s.rate)] for s in settings]
        self.settings = on_device(list(zip(*rows, strict=True)), torch.float32, device)
        self.partial = torch.empty(2, self.chunks.chunks, dtype=torch.float32, device=device)
        self.rates = torch.empty(2, self.chunks.tensors, dtype=torch.float32, device=device)
        self.one, self.zero = torch.ones((), device=device), torch.zeros((), device=device)

    def bind(self, gradients: Sequence[Tensor]) -> None:
        """Record the addresses of the gradients."""
        self.chunks.bind(gradients)

    def launch(
        self,
        gradients: Sequence[Tensor],
        settings: Mapping[str, Tensor],
        factor: Tensor | None = None,
        skipped: Tensor | None = None,
    ) -> None:
        """Norms, trust ratios, updates; `settings["lr"]` has an element for each `rate`. See `GraphUpdate`."""
        from bigstep.gpu import lars_triton as kernels

        tables, chunks, tensors = self.chunks.walk, self.chunks.chunks, self.chunks.tensors
        kind = self.chunks.kind
        with on_device_of(self.partial):
            kernels.norms_kernel[(chunks,)](*tables, self.partial, tensors, chunks, num_warps=WARPS, **kind)
            kernels.trust_kernel[(tensors,)](
                self.partial,
                self.chunks.first_chunk,
                self.settings,
                settings["lr"],
                self.one if factor is None else factor,
                self.rates,
                tensors,
                chunks,
                BLOCK=256,
                num_warps=2,
            )
            kernels.update_kernel[(chunks,)](
                *tables,
                self.rates,
                self.zero if skipped is None else skipped,
                self.momentum,
                tensors,
                chunks,
                NESTEROV=self.nesterov,
                COPIES=self.chunks.has_copies,
                num_warps=WARPS,
                **kind,
            )


@torch.no_grad()
def lars_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    velocities: Sequence[Tensor],
    settings: Sequence[LarsSettings],
    *,
    lr: Tensor,
    momentum: float,
    nesterov: bool = False,
) -> None:
    """One LARS step over all tensors, in place: three launches on a CUDA device, `lars_twin` elsewhere.

    ::

        lambda = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)      1 if |w| or |g| is 0, or adapt=False
        v <- momentum * v + lr * lambda * (g + weight_decay * w)
        w <- w - v                                                               nesterov: w - (momentum * v + u)

    Each call builds the tables anew; `bigstep.optim.LARS` keeps them.

    Args:
        params: Weights.
        grads: Their gradients, which are not changed.
        velocities: Their velocities.
        settings: For each tensor its decay, its adaptation and which element of `lr` it uses.
        lr: Rates on the weights' device, fp32, of shape (rates,).
        momentum: Factor of the old velocity in the new one.
        nesterov: Use Nesterov momentum.

    >>> w, v = torch.ones(2, 2), torch.zeros(2, 2)
    >>> settings = [LarsSettings(trust_coefficient=0.25, eps=0.0)]
    >>> lars_step([w], [torch.ones(2, 2)], [v], settings, lr=torch.tensor([1.0]), momentum=0.9)
    >>> w
    tensor([[0.7500, 0.7500],
            [0.7500, 0.7500]])

    Reference: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, 2017, Algorithm 1.
    """
    if why_not_kernels(params, velocities) is not None or (narrow := narrow_type(grads)) is None:
        lars_twin(params, grads, velocities, settings, lr=lr, momentum=momentum, nesterov=nesterov)
        return
    kernels = LarsKernels(params, velocities, settings, momentum=momentum, nesterov=nesterov, narrow=narrow)
    laid_out = laid_out_like(params, grads)
    kernels.bind(laid_out)
    kernels.launch(laid_out, {"lr": lr})


@torch.no_grad()
def lars_twin(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    velocities: Sequence[Tensor],
    settings: Sequence[LarsSettings],
    *,
    lr: Tensor,
    momentum: float,
    nesterov: bool = False,
) -> None:
    """The specification of LARS: one tensor after another, following the equations of `lars_step`.

    >>> w, v = torch.ones(2), torch.zeros(2)
    >>> lars_twin([w], [torch.ones(2)], [v], [LarsSettings(adapt=False)], lr=torch.tensor([0.5]), momentum=0.9)
    >>> w
    tensor([0.5000, 0.5000])
    """
    for weight, grad, velocity, s in zip(params, grads, velocities, settings, strict=True):
        g = grad.to(weight.dtype)
        weight_norm, grad_norm = weight.norm(), g.norm()
        trust = s.trust_coefficient * weight_norm / (grad_norm + s.weight_decay * weight_norm + s.eps)
        adapted = (weight_norm > 0) & (grad_norm > 0) & s.adapt
        update = lr[s.rate] * torch.where(adapted, trust, 1.0) * (g + s.weight_decay * weight)
        velocity.mul_(momentum).add_(update)
        weight.sub_(momentum * velocity + update if nesterov else velocity)
