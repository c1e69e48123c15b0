"""VGG-16: thirteen 3x3 convolutions and three linear layers that hold nine tenths of its 138 M parameters.

It computes little for each byte of its gradient, so it is the network on which a slow exchange shows first.

Reference: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2014, table 1,
column D. Parameter names and order are those of torchvision.

Differs from the paper: He initialisation in place of a pretrained shallower network.
"""

from __future__ import annotations

from torch import Tensor, nn

from bigstep.errors import ConfigError
from bigstep.models.initial import he_initialise

__all__ = ["VGG", "vgg16"]

WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Maps of each convolution; a 2x2 max-pooling ends each group."""
SMALLEST = 32
"""Smallest side of an image that leaves one pixel after five poolings."""


class VGG(nn.Module):
    """Groups of convolutions, each followed by a halving max-pooling, and three linear layers with dropout.

    >>> import torch
    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in vgg16(classes=1000, channels=3, image_size=224).parameters())
    138357544
    """

    def __init__(self, *, classes: int, channels: int, image_size: int, dropout: float = 0.5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for group in WIDTHS:
            for width in group:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        side = image_size // 2 ** len(WIDTHS)
        self.classifier = nn.Sequential(
            nn.Linear(channels * side * side, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit for each class."""
        return self.classifier(self.features(x).flatten(1))  # type: ignore[no-any-return]  # modules are untyped


def vgg16(*, classes: int, channels: int, image_size: int) -> VGG:
    """Build VGG-16; images need at least 32 pixels a side."""
    if image_size < SMALLEST:
        raise ConfigError(
            f"vgg16 needs images of at least {SMALLEST} pixels a side (got {image_size}); "
            "set data.image_size higher or use model: resnet18."
        )
    return VGG(classes=classes, channels=channels, image_size=image_size)
