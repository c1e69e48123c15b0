"""Networks by name: `build_model("resnet50", classes=1000, channels=3, image_size=224)`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from bigstep.errors import ConfigError, nearest
from bigstep.models.alexnet import AlexNet, alexnet
from bigstep.models.imported import model_from_path, model_from_timm
from bigstep.models.initial import he_initialise
from bigstep.models.resnet import ResNet, resnet18, resnet34, resnet50
from bigstep.models.small import Residual, mlp, resnet9, small

__all__ = [
    "MODELS", "AlexNet", "ResNet", "Residual", "alexnet", "build_model", "he_initialise", "mlp", "resnet18", "resnet34",
    "resnet50", "resnet9", "small",
]  # fmt: skip

MODELS: dict[str, Callable[..., nn.Module]] = {
    "small": small,
    "mlp": mlp,
    "resnet9": resnet9,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "alexnet": alexnet,
}
"""The networks of this package by name."""


def build_model(name: str, *, classes: int, channels: int, image_size: int) -> nn.Module:
    """Build a network with fresh weights from torch's generator; equal seeds give equal weights.

    Args:
        name: one of `MODELS`, `timm:NAME` where timm is installed, or `package.module:function` for your own.
        classes: outputs.
        channels: planes of an input image.
        image_size: side of an input image in pixels.

    Returns:
        The module, on the CPU, in float32.

    >>> import torch
    >>> build_model("small", classes=10, channels=1, image_size=28)(torch.zeros(4, 1, 28, 28)).shape
    torch.Size([4, 10])
    """
    if name.startswith("timm:"):
        return model_from_timm(name.removeprefix("timm:"), classes=classes, channels=channels)
    if ":" in name:
        return model_from_path(name, classes=classes, channels=channels, image_size=image_size)
    if name not in MODELS:
        raise ConfigError(
            f"Unknown model {name!r}: {nearest(name, MODELS)} (timm:NAME and package.module:function work too)."
        )
    return MODELS[name](classes=classes, channels=channels, image_size=image_size)
