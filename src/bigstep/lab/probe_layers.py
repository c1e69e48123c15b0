"""Compute of a model by layer, measured on this machine, as a workload of the planner."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bigstep.plan.workload import Layer, Workload

__all__ = ["as_it_is_trained", "measure_workload"]


@dataclass
class _Leaf:
    """A module without children, and what it was called with."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: int


def measure_workload(
    model: nn.Module,
    sample: Tensor,
    *,
    name: str,
    samples: int = 0,
    repeats: int = 5,
    tell: Callable[[str], None] = lambda line: None,
) -> Workload:
    """Time the forward and backward pass of every layer of `model` on a batch.

    Each leaf module is run by itself on what it received in a forward pass of the whole model; modules without
    parameters count towards the layer before them. The times are then scaled so that they add up to those of the
    whole model, which includes the work between its modules.

    Args:
        model: Any module that takes one tensor and returns one.
        sample: One batch, on the model's device.
        name: Of the workload.
        samples: Samples in an epoch, if known.
        repeats: Each figure is the median of this many.
        tell: Called with what is measured next.

    Returns:
        The workload, measured at the batch of `sample`.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> workload = measure_workload(model, torch.randn(32, 8), name="tiny")
        >>> [layer.name for layer in workload.layers], workload.parameters, workload.measured_batch
        (['0', '2'], 212, 32)
    """
    tell(f"{name} as a whole")
    began = time.perf_counter()
    leaves = _record(model, sample)
    called = {parameter for leaf in leaves for parameter in leaf.module.parameters()}
    unseen = tuple(tuple(parameter.shape) for parameter in model.parameters() if parameter not in called)
    forward, backward = _time(model, (sample,), repeats, sample.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    update = _median(optimizer.step, repeats, sample.device)
    took = time.perf_counter() - began  # its layers repeat that work
    tell(f"{name}, layer by layer: {len(leaves)} layers, about {took:.0f} s" if took > 1 else f"{name}, layer by layer")
    timed = [(leaf, *_time(leaf.module, leaf.inputs, repeats, sample.device)) for leaf in leaves]
    scale_f = forward / max(1e-12, sum(row[1] for row in timed))
    scale_b = backward / max(1e-12, sum(row[2] for row in timed))
    batch = sample.shape[0]
    # used without a module's call, such as a table of positions: its gradient is complete when the backward pass ends
    layers: list[Layer] = [Layer(name="without a module", shapes=unseen)] if unseen else []
    counted: set[Tensor] = set()
    for leaf, leaf_f, leaf_b in timed:
        # a tied one belongs to its first layer: its gradient is complete there, late in the backward pass
        own_parameters = [parameter for parameter in leaf.module.parameters() if parameter not in counted]
        counted.update(own_parameters)
        shapes = tuple(tuple(parameter.shape) for parameter in own_parameters)
        own = Layer(name=leaf.name, shapes=shapes, outputs=leaf.outputs // batch, forward_s=leaf_f * scale_f,
                    backward_s=leaf_b * scale_b)  # fmt: skip
        if shapes or not layers:
            layers.append(own)
        else:
            last = layers[-1]
            layers[-1] = replace(
                last,
                outputs=last.outputs + own.outputs,
                forward_s=last.forward_s + own.forward_s,
                backward_s=last.backward_s + own.backward_s,
            )
    return Workload(name=name, layers=tuple(layers), samples=samples, measured_batch=batch, optimizer_s=update)


def as_it_is_trained(workload: Workload, forward_s: float, backward_s: float, after_s: float) -> Workload:
    """Scale the layers' times to those of whole steps under DDP; `after_s` is all that follows the last gradient.

    DDP copies gradients into its buckets as they come and out of them at the end. The former lengthens the backward
    pass; the latter waits for the exchange, as the update does, and is counted with it.

    >>> layers = (Layer(name="a", shapes=((8, 8),), forward_s=1.0, backward_s=3.0),
    ...           Layer(name="b", shapes=((8, 8),), forward_s=3.0, backward_s=3.0))
    >>> trained = as_it_is_trained(Workload(name="two", layers=layers, optimizer_s=0.1), 8.0, 9.0, 2.0)
    >>> [(layer.forward_s, layer.backward_s) for layer in trained.layers], trained.optimizer_s
    ([(2.0, 4.5), (6.0, 4.5)], 2.0)
    """
    forward = forward_s / sum(layer.forward_s for layer in workload.layers)
    backward = backward_s / sum(layer.backward_s for layer in workload.layers)
    layers = tuple(
        replace(layer, forward_s=layer.forward_s * forward, backward_s=layer.backward_s * backward)
        for layer in workload.layers
    )
    return replace(workload, layers=layers, optimizer_s=after_s)


def _record(model: nn.Module, sample: Tensor) -> list[_Leaf]:
    """The leaves in the order of the forward pass; one that is called again keeps its first call."""
    leaves: dict[nn.Module, _Leaf] = {}
    names = {module: name for name, module in model.named_modules()}

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        if module not in leaves and all(isinstance(value, Tensor) for value in inputs):
            copies, result = tuple(value.detach().clone() for value in inputs), _first(output)
            written_over = any(result.data_ptr() == value.data_ptr() for value in inputs)  # in place, or a view
            leaves[module] = _Leaf(names[module], module, copies, 0 if written_over else result.numel())

    hooks = [m.register_forward_hook(keep) for m in model.modules() if not list(m.children())]
    with torch.no_grad():
        model(sample)
    for hook in hooks:
        hook.remove()
    return list(leaves.values())


def _time(module: nn.Module, inputs: tuple[Tensor, ...], repeats: int, device: torch.device) -> tuple[float, float]:
    """Median seconds of forward and of backward."""
    # copies, since modules such as an in-place ReLU overwrite their inputs; integers have no gradient
    leaves = tuple(value.clone().requires_grad_(value.is_floating_point()) for value in inputs)
    forwards, backwards = [], []
    for repeat in range(repeats + 1):
        given = tuple(value * 1 if value.requires_grad else value for value in leaves)
        start = _now(device)
        output = _first(module(*given))
        middle = _now(device)
        if output.requires_grad:
            output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]  # torch's, without annotations
        if repeat:  # the first one warms up
            forwards.append(middle - start)
            backwards.append(_now(device) - middle)
    return statistics.median(forwards), statistics.median(backwards)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """What the next layer sees: a recurrent layer returns its last state besides."""
    return output if isinstance(output, Tensor) else output[0]


def _median(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    times = []
    for repeat in range(repeats + 1):
        start = _now(device)
        function()
        if repeat:
            times.append(_now(device) - start)
    return statistics.median(times)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
