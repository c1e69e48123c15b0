"""Which parameters an optimizer updates in a step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["with_gradient"]


def with_gradient(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and their gradients; those without a gradient are left out, sparse gradients made dense.

    >>> import torch
    >>> used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> used.sum().backward()
    >>> with_gradient([used, unused])
    ([tensor([1., 1.], requires_grad=True)], [tensor([1., 1.])])
    """
    found = [(param, param.grad) for param in params if param.grad is not None]
    # a norm over a sparse gradient's stored values would count repeated rows wrongly
    return [param for param, _ in found], [grad.to_dense() if grad.is_sparse else grad for _, grad in found]
