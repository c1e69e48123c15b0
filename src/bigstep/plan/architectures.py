"""Shapes and floating-point operations of the built-in networks, by arithmetic: no framework needed.

Shapes and order are those of `bigstep.models`; tests compare them. A sample is one image, or one sequence of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ARCHITECTURES", "Architecture", "LayerFacts"]


class LayerFacts(NamedTuple):
    """One layer of a network."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of its parameter tensors."""
    macs: float
    """Multiply-adds of one sample's forward pass."""
    outputs: int
    """Values of one sample kept for the backward pass, counted at four bytes: two each before and after a norm."""
    sequential: int = 1
    """Number of steps that must run one after another."""


@dataclass(frozen=True)
class Architecture:
    """A built-in network."""

    layers: Callable[[], list[LayerFacts]]
    """Makes the layers, in forward order."""
    samples: int = 0
    """Samples in one epoch of its usual data; 0 if it has no usual data."""
    tokens: int = 0
    """Tokens of a sample; 0 for images."""
    optimizer: str = "lars"
    """The update rule that it is usually trained with."""


def _convolution(name: str, inputs: int, outputs: int, kernel: int, side: int) -> LayerFacts:
    """A convolution without bias and its batch norm; `side` is that of the output map."""
    shapes = ((outputs, inputs, kernel, kernel), (outputs,), (outputs,))
    return LayerFacts(name, shapes, float(outputs * inputs * kernel**2 * side**2), outputs * side**2)


def _linear(name: str, inputs: int, outputs: int) -> LayerFacts:
    return LayerFacts(name, ((outputs, inputs), (outputs,)), float(inputs * outputs), outputs)


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
    norm = LayerFacts("pool5.norm", ((256,), (256,)), 256.0 * 6 * 6, 256 * 6 * 6)
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


def _vgg16() -> list[LayerFacts]:
    """Thirteen convolutions with a bias and no norm, and three linear layers, for 224-pixel images."""
    layers, inputs, side = [], 3, 224
    for group, (width, depth) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), start=1):
        for index in range(1, depth + 1):
            macs, outputs = float(width * inputs * 9 * side**2), width * side**2 // 2  # kept once: no norm follows
            layers.append(LayerFacts(f"conv{group}.{index}", ((width, inputs, 3, 3), (width,)), macs, outputs))
            inputs = width
        side //= 2
    return [*layers, *_dense(inputs * side**2, 4096, 4096, 1000)]


def _sequence_linear(name: str, inputs: int, outputs: int, length: int, *, norm: bool = False) -> LayerFacts:
    """A linear layer on each token, with or without a layer norm before it; inputs and outputs are kept once."""
    norms = ((inputs,), (inputs,)) if norm else ()
    shapes = (*norms, (outputs, inputs), (outputs,))
    return LayerFacts(name, shapes, float(length * inputs * outputs), length * (outputs + norm * inputs) // 2)


def _gpt(depth: int, width: int, vocabulary: int, length: int) -> list[LayerFacts]:
    """A GPT with a tied head: the gradient of the token table is complete only at the end of the backward pass.

    Attention costs length^2 x width multiply-adds: two products, each half empty because of the causal mask.
    """
    table = LayerFacts("tokens", ((vocabulary, width),), 0.0, length * width // 2)
    layers = [table, LayerFacts("positions", ((length, width),), 0.0, 0)]
    for index in range(depth):
        name = f"block{index}"
        layers += [
            _sequence_linear(f"{name}.query_key_value", width, 3 * width, length, norm=True),
            LayerFacts(f"{name}.attention", (), float(length**2 * width), length * width // 2),
            _sequence_linear(f"{name}.out", width, width, length),
            _sequence_linear(f"{name}.mlp1", width, 4 * width, length, norm=True),
            LayerFacts(f"{name}.gelu", (), 0.0, length * 4 * width // 2),
            _sequence_linear(f"{name}.mlp2", 4 * width, width, length),
        ]
    head = LayerFacts("head", (), float(length * width * vocabulary), length * vocabulary // 2)
    return [*layers, LayerFacts("norm", ((width,), (width,)), 0.0, length * width // 2), head]


def _lstm(depth: int, width: int, vocabulary: int, length: int) -> list[LayerFacts]:
    """An LSTM with a tied head: each token waits for the one before it."""
    layers = [LayerFacts("tokens", ((vocabulary, width),), 0.0, length * width // 2)]
    gates = ((4 * width, width), (4 * width, width), (4 * width,), (4 * width,))
    for index in range(depth):
        macs, outputs = float(length * 8 * width**2), length * 6 * width // 2  # four gates, cell and output
        layers.append(LayerFacts(f"layer{index}", gates, macs, outputs, sequential=length))
    head = LayerFacts("head", ((vocabulary,),), float(length * width * vocabulary), length * vocabulary // 2)
    return [*layers, head]


BYTES = 256
"""Vocabulary of text as bytes."""
SHAKESPEARE, BOOKS = 1_003_854, 64_100_000
"""Bytes of training text."""


def _gpt_on(depth: int, width: int, length: int, text: int, vocabulary: int = BYTES) -> Architecture:
    return Architecture(
        lambda: _gpt(depth, width, vocabulary, length), text // length, tokens=length, optimizer="adamw"
    )


ARCHITECTURES: dict[str, Architecture] = {
    "resnet18": Architecture(lambda: _resnet((2, 2, 2, 2), bottleneck=False), 1281167),
    "resnet34": Architecture(lambda: _resnet((3, 4, 6, 3), bottleneck=False), 1281167),
    "resnet50": Architecture(lambda: _resnet((3, 4, 6, 3), bottleneck=True), 1281167),
    "alexnet": Architecture(_alexnet, 1281167),
    "vgg16": Architecture(_vgg16, 1281167),
    "resnet9": Architecture(_resnet9, 50000),
    "small": Architecture(_small, 12000),
    "mlp": Architecture(lambda: _dense(784, 256, 256, 10), 12000),
    # Seide et al. 2014: seven hidden layers of 2048 sigmoid units, 9304 outputs, 46 M parameters
    "speech46m": Architecture(lambda: _dense(429, *[2048] * 7, 9304), optimizer="sgd"),
    "gpt-mini": _gpt_on(3, 128, 64, SHAKESPEARE),
    "gpt-10m": _gpt_on(6, 384, 256, BOOKS),
    "gpt-25m": _gpt_on(8, 512, 256, BOOKS),
    "gpt-124m": _gpt_on(12, 768, 1024, 0, vocabulary=50257),
    "lstm": Architecture(lambda: _lstm(2, 512, BYTES, 256), BOOKS // 256, tokens=256, optimizer="adamw"),
}
"""Token models read bytes in windows of their presets' length; gpt-124m has GPT-2's vocabulary and length."""
