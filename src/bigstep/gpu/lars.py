"""LARS over all tensors of a model in three launches, whatever their number; the plain-torch twin is its specification.

Weights and velocities are fp32; gradients may be fp32 or one lower precision; low-precision copies of the weights are
rewritten in the same pass. The rate and the loss scale are read on the device, so a CUDA graph can hold a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bigstep.gpu.backend import why_not_triton

__all__ = [
    "LarsKernels",
    "LarsSettings",
    "lars_on_device",
    "lars_step",
    "lars_twin",
    "same_memory_order",
    "why_not_lars_kernels",
]

CHUNK, WARPS = 2048, 8
"""Elements and warps of a program of the norm and update launches: few enough elements a thread that its registers
let four programs share a multiprocessor."""
REMEMBERED = 8
"""Sets of tensors whose tables `lars_step` keeps on the device."""


class LarsSettings(NamedTuple):
    """Settings of one tensor."""

    weight_decay: float = 0.0
    adapt: bool = True
    trust_coefficient: float = 0.001
    eps: float = 1e-9
    rate: int = 0
    """Which element of `lr` it takes."""


def same_memory_order(a: Tensor, b: Tensor) -> bool:
    """Whether element k of one's memory is element k of the other's; both without gaps.

    >>> same_memory_order(torch.zeros(2, 3), torch.zeros(3, 2).t())
    False
    """
    order = [(x, y) for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n > 1]
    return a.shape == b.shape and all(x == y for x, y in order)


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def why_not_lars_kernels(params: Sequence[Tensor], velocities: Sequence[Tensor]) -> str | None:
    """Return None if the kernels take these tensors, else the reason in words.

    >>> why_not_lars_kernels([torch.zeros(2)], [torch.zeros(2)])
    'the tensors are on cpu, not on a CUDA device'
    """
    for param, velocity in zip(params, velocities, strict=True):
        if (reason := why_not_triton(param)) is not None:
            return reason
        if param.device != params[0].device:
            return "the parameters are on several devices"
        if param.dtype != torch.float32 or velocity.dtype != torch.float32:
            return f"the kernels update fp32 weights and velocities, not {param.dtype} and {velocity.dtype}"
        if not _dense(param) or not same_memory_order(param, velocity):
            return "a parameter has gaps in memory, or its velocity is laid out otherwise"
    return None


class LarsKernels:
    """The tables of one set of tensors, and the three launches over them.

    Args:
        params: fp32 weights, updated in place.
        velocities: fp32, laid out as the weights.
        settings: One for each tensor.
        momentum: How much of a velocity is kept.
        nesterov: Step along the velocity that the next step would have.
        copies: For each tensor its low-precision copy or None; all of type `narrow`.
        narrow: The type of copies and of gradients that are not fp32.
    """

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
        self.params, self.velocities = list(params), list(velocities)
        self.copies = list(copies) if copies is not None else [None] * len(params)
        self.momentum, self.nesterov, self.narrow = momentum, nesterov, narrow
        for param, copy in zip(self.params, self.copies, strict=True):
            assert copy is None or (copy.dtype == narrow and same_memory_order(param, copy)), "checked by the caller"
        device = self.params[0].device
        rows = [[s.weight_decay, float(s.adapt), s.trust_coefficient, s.eps, float(s.rate)] for s in settings]
        self.settings = torch.tensor(rows, dtype=torch.float32).t().contiguous().to(device)
        firsts = [range(0, param.numel(), CHUNK) for param in self.params]
        counts = [len(each) for each in firsts]
        self.tensors, self.chunks = len(self.params), sum(counts)
        self.chunk_tensor = torch.repeat_interleave(torch.arange(self.tensors), torch.tensor(counts)).int().to(device)
        self.chunk_first = torch.tensor([first for each in firsts for first in each], dtype=torch.int32, device=device)
        self.sizes = torch.tensor([param.numel() for param in self.params], dtype=torch.int32, device=device)
        begins = torch.tensor([0, *counts]).cumsum(0)
        self.first_chunk = begins.int().to(device)
        self.partial = torch.empty(2, self.chunks, dtype=torch.float32, device=device)
        self.rates = torch.empty(2, self.tensors, dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self.table = torch.zeros(5, self.tensors, dtype=torch.int64, device=device)
        self._bound: list[int] = []
        self.aligned = False

    def bind(self, grads: Sequence[Tensor]) -> None:
        """Write the addresses of these gradients into the table; nothing happens if they are already there."""
        addresses = [g.data_ptr() for g in grads]
        if addresses == self._bound:
            return
        for param, grad in zip(self.params, grads, strict=True):
            assert grad.dtype in (torch.float32, self.narrow), "checked by the caller"
            assert same_memory_order(param, grad), "checked by the caller"
        rows = [
            [p.data_ptr() for p in self.params],
            addresses,
            [v.data_ptr() for v in self.velocities],
            [0 if c is None else c.data_ptr() for c in self.copies],
            [int(g.dtype == self.narrow) for g in grads],
        ]
        self.aligned = all(address % 16 == 0 for row in rows[:4] for address in row)
        self.table.copy_(torch.tensor(rows))
        self._bound = addresses

    def launch(
        self,
        lr: Tensor,
        *,
        scale: Tensor | None = None,
        good_steps: Tensor | None = None,
        growth_interval: int = 2000,
        aligned: bool | None = None,
    ) -> None:
        """Norms, trust ratios, updates; capturable in a CUDA graph.

        Args:
            lr: fp32 on the device, an element for each `rate` of the settings.
            scale: fp32 on the device: what the loss was multiplied by. A step with a gradient that is not finite is
                skipped, and `skipped` is then 1.
            good_steps: int32 on the device; if given, `scale` is halved after a skipped step and doubled after
                `growth_interval` good ones.
            growth_interval: See good_steps.
            aligned: That all addresses, also of gradients bound later, are multiples of 16.
        """
        import triton.language as tl

        from bigstep.gpu import lars_triton as kernels

        narrow = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[self.narrow]
        kind = {"CHUNK": CHUNK, "NARROW": narrow, "ALIGNED": self.aligned if aligned is None else aligned}
        tables = (self.table, self.chunk_tensor, self.chunk_first, self.sizes)
        scale = self.one if scale is None else scale
        kernels.norms_kernel[(self.chunks,)](
            *tables, self.partial, self.skipped, self.tensors, self.chunks, num_warps=WARPS, **kind
        )
        kernels.trust_kernel[(self.tensors,)](
            self.partial,
            self.first_chunk,
            self.settings,
            lr,
            scale,
            self.rates,
            self.skipped,
            self.tensors,
            self.chunks,
            BLOCK=256,
            num_warps=2,
        )
        kernels.update_kernel[(self.chunks,)](
            *tables,
            self.rates,
            self.skipped,
            scale,
            good_steps,
            growth_interval,
            self.momentum,
            self.tensors,
            self.chunks,
            NESTEROV=self.nesterov,
            COPIES=any(copy is not None for copy in self.copies),
            DYNAMIC=good_steps is not None,
            num_warps=WARPS,
            **kind,
        )


_remembered: OrderedDict[tuple[object, ...], LarsKernels] = OrderedDict()


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

        lambda = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)      1 where |w| or |g| is 0, or adapt=False
        v <- momentum * v + lr * lambda * (g + weight_decay * w)
        w <- w - v                                                               nesterov: w - (momentum * v + u)

    Args:
        params: Weights.
        grads: Their gradients, never changed.
        velocities: Their velocities.
        settings: Decay, adaptation and which element of `lr`, for each tensor.
        lr: Rates on the weights' device, fp32, of shape (rates,).
        momentum: How much of a velocity is kept.
        nesterov: Step along the velocity that the next step would have.

    >>> w, v = torch.ones(2, 2), torch.zeros(2, 2)
    >>> settings = [LarsSettings(trust_coefficient=0.25, eps=0.0)]
    >>> lars_step([w], [torch.ones(2, 2)], [v], settings, lr=torch.tensor([1.0]), momentum=0.9)
    >>> w
    tensor([[0.7500, 0.7500],
            [0.7500, 0.7500]])

    Reference: You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, 2017, Algorithm 1.
    """
    if not lars_on_device(params, grads, velocities, settings, lr=lr, momentum=momentum, nesterov=nesterov):
        lars_twin(params, grads, velocities, settings, lr=lr, momentum=momentum, nesterov=nesterov)


@torch.no_grad()
def lars_on_device(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    velocities: Sequence[Tensor],
    settings: Sequence[LarsSettings],
    *,
    lr: Tensor,
    momentum: float,
    nesterov: bool = False,
) -> bool:
    """`lars_step` through the kernels; False, with nothing done, if they do not take these tensors.

    >>> w, v, rate = torch.ones(2), torch.zeros(2), torch.ones(1)
    >>> lars_on_device([w], [torch.ones(2)], [v], [LarsSettings()], lr=rate, momentum=0.9)  # on the CPU
    False
    """
    narrow = {g.dtype for g in grads} - {torch.float32}
    if len(narrow) > 1 or not narrow <= {torch.float16, torch.bfloat16}:
        return False
    kind = next(iter(narrow), torch.float16)
    places = tuple(t.data_ptr() for t in (*params, *velocities))
    key = (places, tuple(settings), momentum, nesterov, kind)
    if key not in _remembered:
        if why_not_lars_kernels(params, velocities) is not None:
            return False
        _remembered[key] = LarsKernels(params, velocities, settings, momentum=momentum, nesterov=nesterov, narrow=kind)
        if len(_remembered) > REMEMBERED:
            _remembered.popitem(last=False)
    kernels = _remembered[key]
    laid_out = [
        g if g.stride() == p.stride() or same_memory_order(p, g) else torch.empty_like(p, dtype=g.dtype).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]
    kernels.bind(laid_out)
    kernels.launch(lr)
    return True


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
    """`lars_step` one tensor after another, in the order of the equations.

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
