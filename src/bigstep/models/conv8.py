"""`conv8`: a small network for CIFAR-10 that learns in a few epochs; fixed filters first whiten the image patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from bigstep.models.initial import he_initialise
from bigstep.models.small import GlobalMax, Scaled

__all__ = ["Conv8", "Whitening", "conv8", "conv8_wide"]

EPS = 5e-4
"""Added to the variances of patches, so that directions in which images hardly differ are not amplified to noise."""
NARROW, WIDE = (64, 256, 256), (128, 384, 384)
"""Maps of the three blocks."""


class Whitening(nn.Module):
    """Patches of 2x2 pixels in coordinates that are uncorrelated and of equal variance, each with both signs.

    ::

        C = covariance of the patches = E diag(v) E',    filters = +/- rows of diag(1 / sqrt(v + eps)) E'

    The filters are a buffer: they are set once, from training images, and not trained; the biases are. Before that, the
    coordinates are the pixels themselves.

    Args:
        channels: Of an image.

    >>> layer = Whitening(channels=1)
    >>> layer.see(torch.randn(64, 1, 9, 9).cumsum(3))  # neighbours are correlated
    >>> layer(torch.zeros(2, 1, 9, 9)).shape  # no padding: a side of 9 has 8 patches
    torch.Size([2, 8, 8, 8])

    Reference: Page, "How to Train Your ResNet", 2019, part 8; Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single
    GPU", 2024, section 3.1.
    """

    filters: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        size = 4 * channels
        self.register_buffer("filters", _both_signs(torch.eye(size), channels))
        self.bias = nn.Parameter(torch.zeros(2 * size))

    @torch.no_grad()
    def see(self, images: Tensor) -> None:
        """Set the filters from training images, which are network inputs without augmentation."""
        patches = F.unfold(images.double().cpu(), 2).transpose(0, 1).flatten(1)  # (channel, row, column) x patches
        variances, directions = torch.linalg.eigh(torch.cov(patches))
        whitened = directions / (variances.clamp(min=0) + EPS).sqrt()
        self.filters.copy_(_both_signs(whitened.T, images.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return (samples, 8 * channels, side - 1, side - 1)."""
        return F.conv2d(x, self.filters.to(x.dtype), self.bias.to(x.dtype))


def _both_signs(rows: Tensor, channels: int) -> Tensor:
    return torch.cat([rows, -rows]).view(-1, channels, 2, 2)


class Conv8(nn.Sequential):
    """A sequence whose first layer is set from training images before it is trained."""

    def see(self, images: Tensor) -> None:
        """Set the first layer from some training images, the same on every rank."""
        self.get_submodule("0").see(images)  # type: ignore[operator]  # it is the Whitening


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    """Two convolutions with norm and ReLU; 2x2 max-pooling after the first."""
    first, second = (nn.Conv2d(size, outputs, 3, padding=1, bias=False) for size in (inputs, outputs))
    layers = [first, nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return [*layers, second, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def conv8(*, classes: int, channels: int, image_size: int) -> nn.Sequential:
    """Build eight layers: whitening, three blocks of two convolutions, one linear layer; 0.24 GFLOP for 32x32 images.

    Each convolution starts as the identity for as many output maps as it has input maps, and random for the rest, so
    that images reach the last layer from the first step on. A global maximum feeds the linear layer, whose output is
    divided by nine.

    >>> sum(p.numel() for p in conv8(classes=10, channels=3, image_size=32).parameters())
    1972504

    Reference: the class of networks in Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024.

    Differs from it: ReLU instead of GELU, since norm and ReLU are one kernel here; the norms have a trainable gamma.
    """
    return _conv8(classes, channels, NARROW)


def conv8_wide(*, classes: int, channels: int, image_size: int) -> nn.Sequential:
    """Build `conv8` with wider blocks, which learn more in an epoch; 0.60 GFLOP for 32x32 images.

    >>> sum(p.numel() for p in conv8_wide(classes=10, channels=3, image_size=32).parameters())
    4606232
    """
    return _conv8(classes, channels, WIDE)


def _conv8(classes: int, channels: int, widths: tuple[int, ...]) -> nn.Sequential:
    whitening = Whitening(channels)
    inputs, layers = 8 * channels, []
    for outputs in widths:
        layers += _block(inputs, outputs)
        inputs = outputs
    head = nn.Linear(inputs, classes, bias=False)
    model = Conv8(whitening, nn.ReLU(inplace=True), *layers, GlobalMax(), head, Scaled(1 / 9))
    he_initialise(nn.Sequential(*layers))
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.dirac_(layer.weight[: layer.in_channels])
    nn.init.normal_(head.weight, std=(3 * inputs) ** -0.5)
    return model
