"""LAMB over all tensors of a model in four launches, and AdamW in two; `lamb_twin` is the specification of both.

Weights and moments are fp32; gradients may be fp32 or one lower precision; low-precision copies of the weights are
rewritten in the same pass. Rates, loss scale and the flag to skip are read on the device, so a CUDA graph can hold a
step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bigstep.gpu.backend import on_device_of
from bigstep.gpu.chunks import WARPS, Chunks, on_device, why_not_kernels
from bigstep.gpu.tensor_lists import narrow_type

__all__ = ["LambKernels", "LambSettings", "adamw_kernels", "lamb_twin"]


class LambSettings(NamedTuple):
    """Settings of one tensor."""

    weight_decay: float = 0.0
    adapt: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    rate: int = 0
    """Which element of `lr` the tensor uses."""


class LambKernels:
    """The tables of one set of tensors, and the launches over them, two if no tensor is adapted: a `GraphUpdate`.

    Args:
        params: fp32 weights, updated in place.
        averages: Their first moments, fp32, laid out like the weights.
        squares: Their second moments, likewise.
        steps: The number of steps that each has taken, as 0-dim fp32 tensors.
        settings: One entry for each tensor.
        copies: For each tensor its low-precision copy, or None; all of type `narrow`.
        narrow: The type of the copies, and of gradients that are not fp32.
    """

    in_graph = True

    def __init__(
        self,
        params: Sequence[Tensor],
        averages: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: Sequence[Tensor],
        settings: Sequence[LambSettings],
        *,
        copies: Sequence[Tensor | None] | None = None,
        narrow: torch.dtype = torch.float16,
    ) -> None:
        self.chunks = Chunks(params, [averages, squares, steps], copies, narrow)
        device = self.chunks.device
        rows = [_row(one) for one in settings]
        self.settings = on_device(list(zip(*rows, strict=True)), torch.float32, device)
        self.corrections = torch.empty(2, self.chunks.tensors, dtype=torch.float32, device=device)
        self.partial = torch.empty(2, self.chunks.chunks, dtype=torch.float32, device=device)
        self.rates = torch.empty(self.chunks.tensors, dtype=torch.float32, device=device)
        self.adapts = any(one.adapt for one in settings)
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
        """Corrections, moments, ratios, updates; `settings["lr"]` has an element for each `rate`. See `GraphUpdate`."""
        from bigstep.gpu import lamb_triton as kernels

        tables, chunks, tensors = self.chunks.walk, self.chunks.chunks, self.chunks.tensors
        kind, own = self.chunks.kind, (self.settings, self.corrections, self.rates)
        copies = self.chunks.has_copies
        factor = self.one if factor is None else factor
        skipped = self.zero if skipped is None else skipped
        with on_device_of(self.partial):
            kernels.corrections_kernel[(tensors,)](
                self.chunks.table,
                self.settings,
                settings["lr"],
                skipped,
                self.corrections,
                self.rates,
                tensors,
                num_warps=1,
            )
            kernels.moments_kernel[(chunks,)](
                *tables,
                *own,
                factor,
                skipped,
                self.partial,
                tensors,
                chunks,
                APPLY=not self.adapts,
                COPIES=copies and not self.adapts,
                num_warps=WARPS,
                **kind,
            )
            if not self.adapts:
                return
            kernels.ratios_kernel[(tensors,)](
                self.partial,
                self.chunks.first_chunk,
                self.settings,
                self.rates,
                tensors,
                chunks,
                BLOCK=256,
                num_warps=2,
            )
            kernels.update_kernel[(chunks,)](
                *tables, *own, skipped, tensors, chunks, COPIES=copies, num_warps=WARPS, **kind
            )


def _row(s: LambSettings) -> list[float]:
    logs = [math.log(beta) if beta else -math.inf for beta in s.betas]
    return [s.weight_decay, float(s.adapt), s.eps, float(s.rate), *s.betas, *logs]


def adamw_kernels(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], copies: Sequence[Tensor | None]
) -> LambKernels | None:
    """Kernels for torch's fused AdamW, which is LAMB without adaptation; None if optimizer or tensors do not qualify.

    Unlike torch's own kernels, they read low-precision gradients and rewrite the low-precision copies in the same pass.
    """
    narrow = narrow_type([copy for copy in copies if copy is not None])
    if type(optimizer) is not torch.optim.AdamW or narrow is None:
        return None
    groups = optimizer.param_groups
    if any(g["amsgrad"] or g["maximize"] or not g["fused"] for g in groups) or why_not_kernels(params) is not None:
        return None
    known = [param for param in params if optimizer.state.get(param)]
    if why_not_kernels(known, *([optimizer.state[p][name] for p in known] for name in ("exp_avg", "exp_avg_sq"))):
        return None
    settings = {
        param: LambSettings(group["weight_decay"], False, group["betas"], group["eps"], index)
        for index, group in enumerate(groups)
        for param in group["params"]
    }
    for param in params:
        if not optimizer.state[param]:
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
            }
    averages, squares, steps = (
        [optimizer.state[param][name] for param in params] for name in ("exp_avg", "exp_avg_sq", "step")
    )
    each = [settings[param] for param in params]
    return LambKernels(params, averages, squares, steps, each, copies=copies, narrow=narrow)


@torch.no_grad()
def lamb_twin(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    settings: Sequence[LambSettings],
    *,
    lr: Tensor,
) -> None:
    """The specification of LAMB: one tensor after another, following the equations of `bigstep.optim.LAMB`.

    >>> w, m, v, t = torch.ones(4), torch.zeros(4), torch.zeros(4), torch.zeros(())
    >>> lamb_twin([w], [torch.ones(4)], [m], [v], [t], [LambSettings(eps=0.0)], lr=torch.tensor([0.25]))
    >>> w
    tensor([0.7500, 0.7500, 0.7500, 0.7500])
    """
    for weight, grad, m, v, t, s in zip(params, grads, averages, squares, steps, settings, strict=True):
        g = grad.to(weight.dtype)
        beta1, beta2 = s.betas
        t.add_(1)
        m.mul_(beta1).add_((1 - beta1) * g)
        v.mul_(beta2).add_((1 - beta2) * g**2)
        m_hat = m / (1 - beta1 ** float(t))
        v_hat = v / (1 - beta2 ** float(t))
        u = m_hat / (v_hat.sqrt() + s.eps) + s.weight_decay * weight
        adapted = s.adapt and weight.norm() > 0 and u.norm() > 0
        ratio = weight.norm() / u.norm() if adapted else 1.0
        weight.sub_(lr[s.rate] * ratio * u)
