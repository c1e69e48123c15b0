"""What one step of a model costs a device: gradient sizes and compute by layer."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigstep.config.text import read_yaml
from bigstep.errors import ConfigError, nearest
from bigstep.plan import units
from bigstep.plan.architectures import ARCHITECTURES
from bigstep.plan.cluster import Device
from bigstep.tables.optimizers import OPTIMIZERS

__all__ = ["Layer", "Workload", "workload_names"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: its parameters and its arithmetic."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    flops: float = 0.0
    """Floating-point operations of one sample's forward pass."""
    outputs: int = 0
    """Values of one sample kept in memory for the backward pass, counted at four bytes."""
    sequential: int = 1
    """Number of steps that must run one after another; each costs a launch."""
    forward_s: float = 0.0
    """Measured time of the forward pass at the workload's `measured_batch`; 0 if it is derived from flops."""
    backward_s: float = 0.0
    """Measured time of the backward pass."""

    @functools.cached_property
    def parameters(self) -> int:
        """Numbers in the layer's gradient."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def launches(self) -> int:
        """How many times the device's fixed cost is paid: once per tensor, or once per step of a sequence."""
        return self.sequential if self.sequential > 1 else len(self.shapes)


@dataclass(frozen=True, kw_only=True, eq=False)  # compared by identity, so that derived values can be cached
class Workload:
    """A model as the planner sees it.

    >>> resnet = Workload.load("resnet50")
    >>> resnet.parameters, resnet.tensors, round(resnet.step_flops / 1e9, 1)
    (25557032, 161, 24.3)
    """

    name: str
    layers: tuple[Layer, ...]
    """In forward order."""
    samples: int = 0
    """Samples in one epoch; 0 if unknown."""
    measured_batch: int = 0
    """Local batch at which the layers' times were measured; 0 if they are derived."""
    optimizer_s: float = 0.0
    """Measured time of the update; 0 if it is derived from the memory bandwidth."""
    tokens: int = 0
    """Tokens of a sample; 0 if samples are not sequences."""
    optimizer: str = "lars"
    """The update rule that the model is usually trained with."""

    @functools.cached_property
    def parameters(self) -> int:
        """Numbers in the gradient."""
        return sum(layer.parameters for layer in self.layers)

    @functools.cached_property
    def outputs(self) -> int:
        """Values of one sample kept for the backward pass, by all layers."""
        return sum(layer.outputs for layer in self.layers)

    @functools.cached_property
    def tensors(self) -> int:
        """Number of parameter tensors."""
        return sum(len(layer.shapes) for layer in self.layers)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of all parameters, in backward order (last layer first)."""
        return tuple(shape for layer in reversed(self.layers) for shape in reversed(layer.shapes))

    @property
    def step_flops(self) -> float:
        """Operations of one sample's forward and backward pass; the first layer needs no gradient of its input."""
        return 3 * sum(layer.flops for layer in self.layers) - self.layers[0].flops

    def rate(self, device: Device) -> float:
        """Operations per second on a device: sequences are all matrix products, which run faster than convolutions."""
        return device.matmul_flop_s if self.tokens and device.matmul_flop_s else device.flop_s

    def times(self, device: Device, local_batch: float) -> list[tuple[float, float]]:
        """Seconds of each layer's forward and backward pass on one device, in forward order."""
        if self.measured_batch:
            scale = local_batch / self.measured_batch
            return [(layer.forward_s * scale, layer.backward_s * scale) for layer in self.layers]
        pairs = []
        for index, layer in enumerate(self.layers):
            work, fixed = local_batch * layer.flops / self.rate(device), device.launch_s * layer.launches
            pairs.append((work + fixed / 3, work * (2 if index else 1) + fixed * 2 / 3))
        return pairs

    def compute_s(self, device: Device, local_batch: float) -> float:
        """Seconds of forward and backward on one device."""
        return sum(forward + backward for forward, backward in self.times(device, local_batch))

    def memory_byte(self, local_batch: float, optimizer: str = "") -> float:
        """The least memory of a step: weights, gradients, the optimizer's state, and activations kept for backward.

        All but the last are in float32; an empty name means the rule that the model is usually trained with.

        >>> gpt = Workload.load("gpt-124m")  # 16 bytes a parameter with AdamW, 12 with momentum
        >>> [round(gpt.memory_byte(0, rule) / 1e9, 2) for rule in ("adamw", "sgd")]
        [1.99, 1.49]
        """
        return sum(self.memory_parts(local_batch, optimizer).values())

    def memory_parts(self, local_batch: float, optimizer: str = "") -> dict[str, float]:
        """The parts that `memory_byte` adds up, by name.

        >>> parts = Workload.load("gpt-124m").memory_parts(0, "lamb")
        >>> round(parts["optimizer"] / parts["weights"], 1)
        2.0
        """
        states = OPTIMIZERS[optimizer or self.optimizer].state_bytes
        return {
            "weights": 4.0 * self.parameters,
            "gradients": 4.0 * self.parameters,
            "optimizer": float(states) * self.parameters,
            "activations": 4.0 * local_batch * self.outputs,
        }

    @classmethod
    def load(cls, name: str) -> Workload:
        """Return a built-in model by name, or read a YAML file by path."""
        path = Path(name)
        if path.suffix in (".yaml", ".yml"):
            return cls.from_mapping(read_yaml(path), str(path))
        if name not in ARCHITECTURES:
            raise ConfigError(
                f"Unknown model {name!r:.80}: {nearest(name, ARCHITECTURES)} "
                "Measure any other with `bigstep probe --model` and give its .yaml file."
            )
        return _shipped(name)

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any], origin: str) -> Workload:
        """Build a workload from the content of a file; refuse a bad one in one sentence that names the field."""
        top = {
            "samples": units.count("samples", 0, zero_allowed=True),
            "measured_batch": units.count("measured_batch", 0, zero_allowed=True),
            "optimizer_s": units.duration("optimizer", 0.0),
            "tokens": units.count("tokens", 0, zero_allowed=True),
        }
        values = units.read_fields(mapping, top, {"name": str, "layers": list}, "")
        if not values.get("layers"):
            raise ConfigError(f"{origin} has no layers; list them in forward order under `layers`.")
        layers = tuple(_layer(layer, f"layers[{index}]") for index, layer in enumerate(values["layers"]))
        if values["measured_batch"] and not any(layer.forward_s + layer.backward_s for layer in layers):
            raise ConfigError("measured_batch is set, but no layer has forward_us or backward_us; add them or drop it.")
        if not values["measured_batch"] and not any(layer.flops for layer in layers):
            raise ConfigError(
                f"{origin} says nothing about compute; give the layers gflop, or forward_us with measured_batch."
            )
        usual = "adamw" if values["tokens"] else "lars"
        return cls(**{"name": Path(origin).stem, "optimizer": usual, **values, "layers": layers})


@functools.cache
def _shipped(name: str) -> Workload:
    """A built-in model: the same object each time, so that its cached values are kept."""
    known = ARCHITECTURES[name]
    layers = tuple(
        Layer(name=layer, shapes=shapes, flops=2 * macs, outputs=outputs, sequential=sequential)
        for layer, shapes, macs, outputs, sequential in known.layers()
    )
    return Workload(name=name, layers=layers, samples=known.samples, tokens=known.tokens, optimizer=known.optimizer)


def _layer(mapping: Any, where: str) -> Layer:
    quantities = {
        "flops": units.number("gflop", 0.0, factor=1e9, zero_allowed=True),
        "outputs": units.count("outputs", 0, zero_allowed=True),
        "forward_s": units.duration("forward", 0.0),
        "backward_s": units.duration("backward", 0.0),
    }
    values = units.read_fields(mapping, quantities, {"name": str, "shapes": list}, where)
    shapes = values.pop("shapes", [])
    for shape in shapes:
        if not isinstance(shape, list) or not all(isinstance(side, int) and side > 0 for side in shape):
            raise ConfigError(f"{where}.shapes takes a list of shapes of positive whole numbers (got {shape!r:.60}).")
    return Layer(**{"name": where, **values}, shapes=tuple(tuple(shape) for shape in shapes))


def workload_names() -> list[str]:
    """The names of the built-in models."""
    return sorted(ARCHITECTURES)
