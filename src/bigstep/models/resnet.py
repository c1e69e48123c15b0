"""ResNet-18, 34 and 50 as the large-batch papers trained them: "v1.5", the stride on the 3x3 convolution.

A block computes relu(shortcut(x) + branch(x)), where the branch ends in a batch norm without ReLU, so that a gamma of
zero there turns the whole block into its shortcut. Parameter names and order are those of torchvision, so weights
travel in both directions.

Reference: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, figure 5 and table 1; the stride
on the 3x3 convolution after Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 5.1.

Differs from the paper: the stride above; images of at most 64 pixels get a 3x3 stem of stride 1 without max-pooling,
since the ImageNet stem would leave a map of 1x1 for a 32-pixel image.
"""

from __future__ import annotations

from torch import Tensor, nn

from bigstep.models.initial import he_initialise

__all__ = ["BasicBlock", "Bottleneck", "ResNet", "resnet18", "resnet34", "resnet50"]

SMALL_IMAGE = 64
"""Largest side, in pixels, that gets the small-image stem."""


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def _conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(shortcut(x) + branch(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return self.relu(x + shortcut)  # type: ignore[no-any-return]  # modules are untyped in torch


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = _conv1x1(inputs, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, width * self.expansion)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(shortcut(x) + branch(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return self.relu(x + shortcut)  # type: ignore[no-any-return]  # modules are untyped in torch


class ResNet(nn.Module):
    """Four stages of residual blocks, a global average and one linear layer.

    Args:
        block: the kind of block.
        depths: blocks in each of the four stages.
        classes: outputs.
        channels: planes of an input image.
        image_size: side of an input image in pixels; decides the stem.

    >>> import torch
    >>> model = resnet18(classes=10, channels=3, image_size=32)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> sum(p.numel() for p in resnet50(classes=1000, channels=3, image_size=224).parameters())
    25557032
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        classes: int,
        channels: int,
        image_size: int,
    ) -> None:
        super().__init__()
        large = image_size > SMALL_IMAGE
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, padding=3, bias=False) if large else _conv3x3(channels, 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        wide = block.expansion
        self.layer1 = _stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = _stage(block, 64 * wide, 128, depths[1], stride=2)
        self.layer3 = _stage(block, 128 * wide, 256, depths[2], stride=2)
        self.layer4 = _stage(block, 256 * wide, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * wide, classes)
        he_initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit for each class."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]  # modules are untyped in torch


def _stage(
    block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    outputs = width * block.expansion
    downsample = None
    if stride != 1 or inputs != outputs:
        downsample = nn.Sequential(_conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))
    first = block(inputs, width, stride, downsample)
    return nn.Sequential(first, *(block(outputs, width) for _ in range(depth - 1)))


def resnet18(*, classes: int, channels: int, image_size: int) -> ResNet:
    """Build ResNet-18 (11.7 M parameters with 1,000 classes)."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes=classes, channels=channels, image_size=image_size)


def resnet34(*, classes: int, channels: int, image_size: int) -> ResNet:
    """Build ResNet-34 (21.8 M parameters with 1,000 classes)."""
    return ResNet(BasicBlock, (3, 4, 6, 3), classes=classes, channels=channels, image_size=image_size)


def resnet50(*, classes: int, channels: int, image_size: int) -> ResNet:
    """Build ResNet-50 (25,557,032 parameters in 161 tensors with 1,000 classes)."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes=classes, channels=channels, image_size=image_size)
