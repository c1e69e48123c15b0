"""AlexNet with batch norm, the second network of the large-batch papers.

Reference: Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012; batch
norm in place of local response normalisation after You et al., "Large Batch Training of Convolutional Networks", 2017;
the norm after the fifth pooling after Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision:
Training ImageNet in Four Minutes", 2018.

Differs from the papers: one tower instead of two with grouped convolutions; He initialisation in the convolutions and
in the two hidden linear layers, which N(0, 0.01^2) would start too small behind a batch norm.
"""

from __future__ import annotations

from torch import Tensor, nn

from bigstep.errors import ConfigError
from bigstep.models.initial import he_initialise

__all__ = ["AlexNet", "alexnet"]

SMALLEST = 63
"""Smallest side of an image that leaves at least one pixel after the fifth pooling."""


class AlexNet(nn.Module):
    """Five convolutions, each with batch norm, and three linear layers with dropout.

    >>> import torch
    >>> alexnet(classes=10, channels=3, image_size=96)(torch.zeros(1, 3, 96, 96)).shape
    torch.Size([1, 10])
    """

    def __init__(self, *, classes: int, channels: int, image_size: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(channels, 96, kernel=11, stride=4, padding=2),
            nn.MaxPool2d(3, 2),
            *_convolution(96, 256, kernel=5, padding=2),
            nn.MaxPool2d(3, 2),
            *_convolution(256, 384, kernel=3, padding=1),
            *_convolution(384, 384, kernel=3, padding=1),
            *_convolution(384, 256, kernel=3, padding=1),
            nn.MaxPool2d(3, 2),
            nn.BatchNorm2d(256),
        )
        side = (image_size + 2 * 2 - 11) // 4 + 1
        for _ in range(3):  # the three poolings; every other convolution keeps the size
            side = (side - 3) // 2 + 1
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(256 * side * side, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )
        he_initialise(self)
        for layer in list(self.classifier)[:-1]:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit for each class."""
        return self.classifier(self.features(x))  # type: ignore[no-any-return]  # modules are untyped in torch


def _convolution(
    inputs: int, outputs: int, *, kernel: int, stride: int = 1, padding: int
) -> tuple[nn.Module, nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def alexnet(*, classes: int, channels: int, image_size: int) -> AlexNet:
    """Build AlexNet with batch norm; images need at least 63 pixels a side."""
    if image_size < SMALLEST:
        raise ConfigError(
            f"alexnet needs images of at least {SMALLEST} pixels a side (got {image_size}); "
            "set data.image_size higher or use model: resnet18."
        )
    return AlexNet(classes=classes, channels=channels, image_size=image_size)
