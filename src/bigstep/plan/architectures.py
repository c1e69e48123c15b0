"""Shapes and floating-point operations of the networks that ship, by arithmetic: no framework needed.

Each function returns layers in forward order: (name, shapes of the parameter tensors, multiply-adds of one sample's
forward pass, numbers in its output). Shapes and order are those of `bigstep.models`, which the tests hold them to.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ARCHITECTURES", "LayerFacts"]

LayerFacts = tuple[str, tuple[tuple[int, ...], ...], float, int]


def _convolution(name: str, inputs: int, outputs: int, kernel: int, side: int) -> LayerFacts:
    """A convolution without bias and its batch norm; `side` is that of the output map."""
    shapes = ((outputs, inputs, kernel, kernel), (outputs,), (outputs,))
    return name, shapes, float(outputs * inputs * kernel**2 * side**2), outputs * side**2


def _linear(name: str, inputs: int, outputs: int) -> LayerFacts:
    return name, ((outputs, inputs), (outputs,)), float(inputs * outputs), outputs


def _resnet(depths: tuple[int, int, int, int], *, bottleneck: bool) -> list[LayerFacts]:
    """A ResNet for 224-pixel images, the stride on the 3x3 convolution."""
    layers = [_convolution("stem", 3, 64, 7, 112)]
    inputs, side, expansion = 64, 56, 4 if bottleneck else 1
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for block in range(depth):
            before, name = side, f"stage{stage + 1}.{block}"
            if stage > 0 and block == 0:
                side //= 2
            if bottleneck:
                layers += [
                    _convolution(f"{name}.conv1", inputs, width, 1, before),
                    _convolution(f"{name}.conv2", width, width, 3, side),
                    _convolution(f"{name}.conv3", width, width * 4, 1, side),
                ]
            else:
                layers += [
                    _convolution(f"{name}.conv1", inputs, width, 3, side),
                    _convolution(f"{name}.conv2", width, width, 3, side),
                ]
            if block == 0 and inputs != width * expansion:
                layers.append(_convolution(f"{name}.shortcut", inputs, width * expansion, 1, side))
            inputs = width * expansion
    return [*layers, _linear("classifier", inputs, 1000)]


def _alexnet() -> list[LayerFacts]:
    """One tower with batch norm, for 224-pixel images."""
    norm: LayerFacts = ("pool5.norm", ((256,), (256,)), 256.0 * 6 * 6, 256 * 6 * 6)
    return [
        _convolution("conv1", 3, 96, 11, 55),
        _convolution("conv2", 96, 256, 5, 27),
        _convolution("conv3", 256, 384, 3, 13),
        _convolution("conv4", 384, 384, 3, 13),
        _convolution("conv5", 384, 256, 3, 13),
        norm,
        _linear("linear6", 256 * 6 * 6, 4096),
        _linear("linear7", 4096, 4096),
        _linear("linear8", 4096, 1000),
    ]


def _resnet9() -> list[LayerFacts]:
    """The CIFAR-10 network, for 32-pixel images."""
    return [
        _convolution("conv1", 3, 64, 3, 32),
        _convolution("conv2", 64, 128, 3, 32),
        _convolution("residual1.conv1", 128, 128, 3, 16),
        _convolution("residual1.conv2", 128, 128, 3, 16),
        _convolution("conv3", 128, 256, 3, 16),
        _convolution("conv4", 256, 512, 3, 8),
        _convolution("residual2.conv1", 512, 512, 3, 4),
        _convolution("residual2.conv2", 512, 512, 3, 4),
        _linear("classifier", 512, 10),
    ]


def _small() -> list[LayerFacts]:
    """The network of the embedded data, for 28-pixel images."""
    return [
        _convolution("conv1", 1, 16, 3, 14),
        _convolution("conv2", 16, 32, 3, 7),
        _convolution("residual.conv1", 32, 32, 3, 7),
        _convolution("residual.conv2", 32, 32, 3, 7),
        _convolution("conv3", 32, 64, 3, 4),
        _linear("classifier", 64, 10),
    ]


def _dense(*widths: int) -> list[LayerFacts]:
    pairs = list(zip(widths, widths[1:], strict=False))
    return [_linear(f"linear{index + 1}", inputs, outputs) for index, (inputs, outputs) in enumerate(pairs)]


ARCHITECTURES: dict[str, Callable[[], list[LayerFacts]]] = {
    "resnet18": lambda: _resnet((2, 2, 2, 2), bottleneck=False),
    "resnet34": lambda: _resnet((3, 4, 6, 3), bottleneck=False),
    "resnet50": lambda: _resnet((3, 4, 6, 3), bottleneck=True),
    "alexnet": _alexnet,
    "resnet9": _resnet9,
    "small": _small,
    "mlp": lambda: _dense(784, 256, 256, 10),
    # Seide et al. 2014: seven hidden layers of 2048 sigmoid units, 9304 outputs, 46 M parameters
    "speech46m": lambda: _dense(429, *[2048] * 7, 9304),
}
