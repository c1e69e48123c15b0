"""Lists of tensors for multi-tensor operations: split so that one kernel takes many; checks of their memory layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["by_device_and_dtype", "global_norm", "laid_out_like", "narrow_type", "same_memory_order"]


def by_device_and_dtype(tensors: Sequence[Tensor], *beside: Sequence[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Split parallel lists by the device and dtype of `tensors`, in order of first appearance.

    >>> ones = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32)]
    >>> [(len(alike), len(others)) for alike, others in by_device_and_dtype(ones, ones)]
    [(2, 2), (1, 1)]
    """
    found: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], ...]] = {}
    for row in zip(tensors, *beside, strict=True):
        lists = found.setdefault((row[0].device, row[0].dtype), tuple([] for _ in row))
        for each, tensor in zip(lists, row, strict=True):
            each.append(tensor)
    return list(found.values())


def global_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The norm of all tensors as if they were one vector, computed in `dtype`.

    >>> global_norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float16)], torch.float32)
    tensor(5.)
    """
    norms = [norm for (alike,) in by_device_and_dtype(tensors) for norm in torch._foreach_norm(alike, 2, dtype=dtype)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def same_memory_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors without gaps store their elements in the same order.

    >>> same_memory_order(torch.zeros(2, 3), torch.zeros(3, 2).t())
    False
    """
    order = [(x, y) for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n > 1]
    return a.shape == b.shape and all(x == y for x, y in order)


def laid_out_like(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients in the memory order of their parameters; almost all are already, and are returned as they are.

    >>> laid_out_like([torch.zeros(2, 3)], [torch.zeros(3, 2).t()])[0].stride()
    (3, 1)
    """
    return [
        g if same_memory_order(p, g) else torch.empty_like(p, dtype=g.dtype).copy_(g)
        for p, g in zip(params, grads, strict=True)
    ]


def narrow_type(grads: Sequence[Tensor]) -> torch.dtype | None:
    """The low precision of the gradients that are not fp32; fp16 if all are fp32; None for any other mixture or type.

    >>> narrow_type([torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)])
    torch.bfloat16
    """
    found = {g.dtype for g in grads} - {torch.float32}
    low = next(iter(found), torch.float16)
    return low if len(found) <= 1 and low in (torch.float16, torch.bfloat16) else None
