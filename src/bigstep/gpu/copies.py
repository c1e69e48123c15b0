"""Low-precision copies of the weights that convolutions and linear layers compute with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["WeightCopies"]

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


class WeightCopies:
    """Copies of the weights of convolutions and linear layers, made once and then rewritten by each update.

    A weight that a module of another kind shares, such as an embedding tied to the last layer, has no copy: that module
    would then compute in low precision too, unlike under autocast.

    Args:
        model: The model that holds the weights.
        params: The trained weights.
        dtype: The type of the copies; none are made unless it is fp16 or bf16.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> copies = WeightCopies(model, list(model.parameters()), torch.bfloat16)
    >>> [None if copy is None else copy.dtype for copy in copies.each]
    [torch.bfloat16, torch.bfloat16, None, None]
    """

    def __init__(self, model: nn.Module, params: Sequence[Tensor], dtype: torch.dtype) -> None:
        inside, outside = (
            {id(p) for m in model.modules() if isinstance(m, LAYERS) == fits for p in m.parameters(recurse=False)}
            for fits in (True, False)
        )
        wanted = inside - outside if dtype in (torch.float16, torch.bfloat16) else set()
        self.params = list(params)
        self.each: list[Tensor | None] = [
            p.detach().to(dtype, memory_format=torch.preserve_format, copy=True).requires_grad_()
            if id(p) in wanted
            else None
            for p in self.params
        ]
        """The copy of each weight, or None."""
        self.leaves = [p if copy is None else copy for p, copy in zip(self.params, self.each, strict=True)]
        """The tensors that the forward pass reads and that gradients are taken of: copies, and weights without one."""
        names = {id(p): name for name, p in model.named_parameters()}
        self.by_name = {names[id(p)]: c for p, c in zip(self.params, self.each, strict=True) if c is not None}
        self._versions: list[int] = []
        self.note()

    @torch.no_grad()
    def rewrite(self) -> None:
        """Bring the copies up to date with the weights."""
        for param, copy in zip(self.params, self.each, strict=True):
            if copy is not None:
                copy.copy_(param)
        self.note()

    def note(self) -> None:
        """Mark the copies as up to date, after an update that rewrote them."""
        self._versions = [param._version for param in self.params]

    def rewrite_if_changed(self) -> None:
        """Bring the copies up to date if torch's version counters show that a weight has changed since."""
        if self.by_name and self._versions != [param._version for param in self.params]:
            self.rewrite()
