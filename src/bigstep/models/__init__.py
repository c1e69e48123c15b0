"""Networks by name: `build_model("resnet50", classes=1000, channels=3, image_size=224)`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from bigstep.errors import ConfigError, nearest
from bigstep.models import gpt as gpts
from bigstep.models.alexnet import AlexNet, alexnet
from bigstep.models.gpt import GPT
from bigstep.models.imported import model_from_path, model_from_timm, model_from_transformers
from bigstep.models.initial import he_initialise
from bigstep.models.lstm import LSTM, lstm, lstm_mini
from bigstep.models.resnet import ResNet, resnet18, resnet34, resnet50
from bigstep.models.small import Residual, mlp, resnet9, small
from bigstep.models.vgg import VGG, vgg16

__all__ = [
    "GPT", "LSTM", "MODELS", "VGG", "AlexNet", "ResNet", "Residual", "alexnet", "build_model", "he_initialise", "mlp",
    "resnet18", "resnet34", "resnet50", "resnet9", "small", "vgg16",
]  # fmt: skip

IMAGE_MODELS: dict[str, Callable[..., nn.Module]] = {
    "small": small,
    "mlp": mlp,
    "resnet9": resnet9,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "alexnet": alexnet,
    "vgg16": vgg16,
}
TOKEN_MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt-mini": gpts.gpt_mini,
    "gpt-10m": gpts.gpt_10m,
    "gpt-25m": gpts.gpt_25m,
    "gpt-124m": gpts.gpt_124m,
    "gpt-mini-untied": gpts.gpt_mini_untied,
    "gpt-10m-untied": gpts.gpt_10m_untied,
    "gpt-25m-untied": gpts.gpt_25m_untied,
    "gpt-124m-untied": gpts.gpt_124m_untied,
    "lstm": lstm,
    "lstm-mini": lstm_mini,
}
MODELS = IMAGE_MODELS | TOKEN_MODELS
"""The networks of this package by name."""


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
    has = "tokens" if "vocabulary" in shape else "images"
    if name.startswith("timm:"):
        _require_input(name, "images", has)
        return model_from_timm(name.removeprefix("timm:"), classes=shape["classes"], channels=shape["channels"])
    if name.startswith("hf:"):
        _require_input(name, "tokens", has)
        return model_from_transformers(name.removeprefix("hf:"), **shape)
    if ":" in name:
        return model_from_path(name, **shape)
    if name not in MODELS:
        raise ConfigError(
            f"Unknown model {name!r}: {nearest(name, MODELS)} "
            "(timm:NAME, hf:NAME and package.module:function work too)."
        )
    _require_input(name, "tokens" if name in TOKEN_MODELS else "images", has)
    return MODELS[name](**shape)


def _require_input(name: str, takes: str, has: str) -> None:
    if takes != has:
        other = "gpt-mini" if has == "tokens" else "small"
        raise ConfigError(
            f"model: {name} takes {takes}, but the data are {has}; choose a model of {has}, such as {other}, "
            "or other data."
        )
