"""The arithmetic of a run: which types compute, and which hold the weights."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Precision"]

_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Types by the name that a configuration gives them.

    >>> Precision("bf16", "cpu").weights, Precision("float64", "cpu").weights
    (torch.float32, torch.float64)
    """

    name: str
    device: str

    @property
    def weights(self) -> torch.dtype:
        """The type of weights, and of inputs that are not counted in whole numbers."""
        return torch.float64 if self.name == "float64" else torch.float32

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would vanish in the type that computes, so that the loss is scaled."""
        return self.name == "fp16"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward."""
        dtype = _COMPUTE.get(self.name)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device, dtype)
