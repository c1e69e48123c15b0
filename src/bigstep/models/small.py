"""Small networks: `small` for two CPU cores, `resnet9` for small images on a GPU, `mlp` without batch norm."""

from __future__ import annotations

from torch import Tensor, nn

from bigstep.models.initial import he_initialise

__all__ = ["Residual", "mlp", "resnet9", "small"]


class Residual(nn.Module):
    """Return relu(x + branch(x)), the branch being conv, norm, relu, conv, norm.

    The branch ends in a norm without ReLU: with gamma = 0 there, the block starts as the identity and still learns
    (behind a ReLU its gradient would be zero for ever).
    """

    downsample = None  # the shortcut is x itself; blocks of larger networks have a module here

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    @property
    def last_norm(self) -> nn.Module:
        """The norm that `bigstep.norm.zero_gamma` starts at zero."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(x + branch(x))."""
        branch = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(x + branch)  # type: ignore[no-any-return]  # modules are untyped in torch


def _convolution(inputs: int, outputs: int, stride: int = 1) -> tuple[nn.Module, nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def small(*, classes: int, channels: int, image_size: int) -> nn.Sequential:
    """Build a residual network that two CPU cores train in about a minute on 12,000 images of 28x28.

    Width 16, 32 with a residual block, 64; every convolution outside the block halves the map, so that no layer runs
    at full size, and a global average feeds one linear layer.

    >>> sum(p.numel() for p in small(classes=10, channels=1, image_size=28).parameters())
    42618
    """
    model = nn.Sequential(
        *_convolution(channels, 16, stride=2),
        *_convolution(16, 32, stride=2),
        Residual(32),
        *_convolution(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )
    he_initialise(model)
    return model


class GlobalMax(nn.Module):
    """Return the maximum of each map."""

    def forward(self, x: Tensor) -> Tensor:
        """Return samples x channels."""
        return x.amax((2, 3))


class Scaled(nn.Module):
    """Return x times a constant: logits divided by, say, eight keep the last layer stable at large learning rates."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return factor * x."""
        return self.factor * x


def _pooled(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """A convolution, 2x2 max-pooling, norm and ReLU; the norm handles a quarter of what it would before the pooling."""
    conv, norm, relu = _convolution(inputs, outputs)
    return conv, nn.MaxPool2d(2), norm, relu


def resnet9(*, classes: int, channels: int, image_size: int) -> nn.Sequential:
    """Build the nine-layer residual network that the CIFAR-10 speed contests settled on.

    Width 64, 128 with a residual block, 256, 512 with a residual block; the map is halved by max-pooling three times,
    before the norms; a global maximum feeds one linear layer, whose output is divided by eight.

    >>> sum(p.numel() for p in resnet9(classes=10, channels=3, image_size=32).parameters())
    6573130

    Reference: Coleman et al., "DAWNBench", 2017, and the entries for CIFAR-10 that followed it; Page, "How to Train
    Your ResNet", 2019, part 8 (pooling before the norm).

    Differs from those entries: the ReLU of a residual block comes after the sum, so that zero gamma works.
    """
    layers: list[nn.Module] = [*_convolution(channels, 64), *_pooled(64, 128), Residual(128)]
    layers += [*_pooled(128, 256), *_pooled(256, 512), Residual(512)]
    head = nn.Linear(512, classes)
    model = nn.Sequential(*layers, GlobalMax(), head, Scaled(0.125))
    he_initialise(model)
    nn.init.normal_(head.weight, std=512**-0.5)  # N(0, 0.01^2) is meant for logits that are not scaled down
    return model


def mlp(*, classes: int, channels: int, image_size: int) -> nn.Sequential:
    """Build two hidden layers of 256 units, with no batch norm, so that every sample is independent of the others.

    >>> sum(p.numel() for p in mlp(classes=10, channels=1, image_size=28).parameters())
    269322
    """
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * image_size * image_size, 256),
        nn.ReLU(inplace=True),
        nn.Linear(256, 256),
        nn.ReLU(inplace=True),
        nn.Linear(256, classes),
    )
    he_initialise(model)
    for layer in list(model)[:-1]:
        if isinstance(layer, nn.Linear):  # N(0, 0.01^2) is meant for an output layer; here the signal would vanish
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model
