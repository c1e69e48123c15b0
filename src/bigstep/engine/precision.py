"""The arithmetic of a run: which types compute, and which hold the weights."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, cast

import torch

from bigstep.tables.precisions import find_precision

__all__ = ["Precision"]


@dataclass(frozen=True)
class Precision:
    """Torch's types for the name that a configuration gives them, on a kind of device.

    >>> Precision("bf16", "cpu").weights, Precision("bf16", "cpu").products
    (torch.float32, torch.bfloat16)
    """

    name: str
    device: str

    @property
    def weights(self) -> torch.dtype:
        """The type of weights, and of inputs that are not integers."""
        return cast(torch.dtype, getattr(torch, find_precision(self.name).weights))

    @property
    def products(self) -> torch.dtype:
        """The type of the products of forward and backward."""
        return cast(torch.dtype, getattr(torch, find_precision(self.name).products))

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would underflow in the type that computes, so that the loss is scaled."""
        return find_precision(self.name).loss_scale > 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward."""
        mixed = self.products != self.weights
        return torch.autocast(self.device, self.products) if mixed else contextlib.nullcontext()
