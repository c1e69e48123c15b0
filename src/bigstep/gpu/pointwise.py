"""Convolutions as ResNets use them, each gradient computed by whichever library is faster for it.

On an H200 cuDNN's forward pass is the fastest for all of them. For 1x1 kernels a plain matrix product is faster for the
gradient of the input, and on small images also for that of the weight (benchmarks/resnet50).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import Tensor

from bigstep.gpu import batch_norm_launch as launch
from bigstep.gpu.backend import why_not_triton

__all__ = ["global_mean", "pointwise", "stem_convolution"]

SMALL_IMAGE = 14
"""Largest image height at which the weight's gradient is computed as a plain matrix product."""


def _rows(x: Tensor) -> Tensor:
    """A view of a channels_last tensor as pixels x channels."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    """1x1 convolution of stride 1 without bias.

    >>> pointwise(torch.ones(1, 3, 2, 2), torch.ones(4, 3, 1, 1)).flatten()[:2]
    tensor([3., 3.])
    """
    if not x.is_cuda:
        return F.conv2d(x, weight.to(x.dtype))
    if torch.is_autocast_enabled(x.device.type):  # autocast does not convert the inputs of a custom function
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    out: Tensor = _Pointwise.apply(x, weight)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        x, weight = ctx.saved_tensors
        n, _, h, w = x.shape
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = (_rows(dy) @ weight.flatten(1)).view(n, h, w, -1).permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            if h <= SMALL_IMAGE:
                dweight = (_rows(dy).t() @ _rows(x)).view(weight.shape)
            else:
                mask = [False, True, False]
                _, dweight, _ = torch.ops.aten.convolution_backward(
                    dy, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask
                )
        return dx, dweight


def stem_convolution(x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """A convolution without bias over few planes; three are padded to four, which suits tensor cores.

    >>> x, weight = torch.ones(1, 3, 4, 4), torch.ones(2, 3, 3, 3)
    >>> stem_convolution(x, weight, (1, 1), (0, 0)).flatten()[:2]
    tensor([27., 27.])
    """
    if x.shape[1] == 3 and not x.requires_grad and why_not_triton(x) is None:
        x = launch.add_plane(x.contiguous(memory_format=torch.channels_last))
    if x.shape[1] > weight.shape[1]:
        weight = F.pad(weight, (0, 0, 0, 0, 0, x.shape[1] - weight.shape[1]))
        weight = weight.contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, weight, stride=stride, padding=padding)


def global_mean(x: Tensor) -> Tensor:
    """Mean over height and width: samples x channels.

    >>> global_mean(torch.arange(8.0).view(1, 2, 2, 2))
    tensor([[1.5000, 5.5000]])
    """
    out: Tensor = _GlobalMean.apply(x)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean((2, 3))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        n, c, h, w = ctx.shape
        share = (gradients[0] / (h * w)).contiguous()
        # torch copies an expanded tensor element by element; in eight-byte elements it is four times as fast in fp16
        wide = share.view(torch.float64) if share.element_size() * c % 8 == 0 else share
        spread = wide.view(n, 1, 1, -1).expand(n, h, w, wide.shape[1]).contiguous().view(share.dtype)
        out: Tensor = spread.permute(0, 3, 1, 2)
        return out
