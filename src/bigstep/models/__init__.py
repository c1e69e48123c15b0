"""Networks by name: `build_model("resnet50", classes=1000, channels=3, image_size=224)`."""

from __future__ import annotations

from torch import nn

from bigstep.errors import ConfigError
from bigstep.models.alexnet import AlexNet, alexnet
from bigstep.models.conv8 import conv8
from bigstep.models.gpt import GPT
from bigstep.models.initial import SeesImages, he_initialise
from bigstep.models.lstm import LSTM
from bigstep.models.resnet import ResNet, resnet18, resnet34, resnet50
from bigstep.models.small import Residual, mlp, resnet9, small
from bigstep.models.vgg import VGG, vgg16
from bigstep.tables import load, models
from bigstep.tables.models import FORMS, find_model

__all__ = [
    "GPT", "LSTM", "MODELS", "VGG", "AlexNet", "ResNet", "Residual", "SeesImages", "alexnet", "build_model", "conv8",
    "he_initialise", "mlp", "resnet18", "resnet34", "resnet50", "resnet9", "small", "vgg16",
]  # fmt: skip

MODELS = {name: load(entry.home) for name, entry in models.MODELS.items()}
"""The networks of this package by name, as `bigstep.tables.models` lists them."""


def build_model(name: str, **shape: int) -> nn.Module:
    """Build a network with fresh weights from torch's generator; equal seeds give equal weights.

    Args:
        name: one of `MODELS`, `timm:NAME` or `hf:NAME` where timm or transformers is installed, or
            `package.module:function` for your own.
        shape: what the data are like: `classes`, `channels` and `image_size` (side in pixels) of images, or
            `vocabulary` (different tokens) and `length` (tokens of the longest sequence) of text.

    Returns:
        The module, on the CPU, in float32.

    >>> import torch
    >>> build_model("small", classes=10, channels=1, image_size=28)(torch.zeros(4, 1, 28, 28)).shape
    torch.Size([4, 10])
    >>> build_model("gpt-mini", vocabulary=256, length=32)(torch.zeros(4, 32, dtype=torch.int64)).shape
    torch.Size([4, 32, 256])
    """
    entry = find_model(name)
    takes, has = entry.input, "tokens" if "vocabulary" in shape else "images"
    if takes not in ("any", has):
        other = "gpt-mini" if has == "tokens" else "small"
        raise ConfigError(
            f"model: {name} takes {takes}, but the data are {has}; choose a model for {has}, such as {other}, "
            "or other data."
        )
    library, colon, rest = name.partition(":")
    named = [rest if f"{library}:NAME" in FORMS else name] if colon else []
    model: nn.Module = load(entry.home)(*named, **shape)
    return model
