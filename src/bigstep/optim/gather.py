"""Lists of tensors for multi-tensor updates: what has a gradient, sorted so that one kernel can take many."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["by_device_and_dtype", "with_gradient"]


def with_gradient(params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of parameter and gradient; parameters without a gradient are left out, sparse gradients made dense.

    >>> used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> used.sum().backward()
    >>> len(with_gradient([used, unused]))
    1
    """
    pairs = [(param, param.grad) for param in params if param.grad is not None]
    # a norm over a sparse gradient's stored values would count repeated rows wrongly
    return [(param, grad.to_dense() if grad.is_sparse else grad) for param, grad in pairs]


def by_device_and_dtype(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Split pairs into lists (parameters, gradients) of one device and dtype each, in order of first appearance.

    >>> pair = lambda dtype: (torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype))
    >>> lists = by_device_and_dtype([pair(torch.float32), pair(torch.float64), pair(torch.float32)])
    >>> [len(params) for params, grads in lists]
    [2, 1]
    """
    lists: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for param, grad in pairs:
        params, grads = lists.setdefault((param.device, param.dtype), ([], []))
        params.append(param)
        grads.append(grad)
    return list(lists.values())
