"""How the gradients of a model lie in buckets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bigstep.errors import require

__all__ = ["real_shape", "require_dense", "shape_as", "shapes_of"]


def require_dense(module: nn.Module) -> None:
    """Refuse modules whose gradients are sparse: a bucket holds dense values."""
    for name, child in module.named_modules():
        require(
            not (isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse),
            f"The gradient of {name or type(child).__name__} is sparse, but an Exchange carries dense ones only: "
            "make it with sparse=False.",
        )


def shapes_of(names: Mapping[Tensor, str]) -> dict[str, torch.Size]:
    """The shapes of all gradients by name, as buckets hold them."""
    return {name: real_shape(parameter) for parameter, name in names.items()}


def real_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter's gradient in a bucket, which holds a complex number as two real ones."""
    return torch.Size((*parameter.shape, 2)) if parameter.is_complex() else parameter.shape


def shape_as(parameter: Tensor, flat: Tensor) -> Tensor:
    """View a piece of a bucket as the parameter's gradient: DDP gives it the parameter's strides, channels-last too."""
    values = torch.view_as_complex(flat.view(-1, 2)) if parameter.is_complex() else flat
    return values.as_strided(parameter.size(), parameter.stride())
