"""A whole training step as one graph: forward, backward, loss scale, clipping and update, without the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigstep.errors import ConfigError
from bigstep.gpu.capture import CudaGraphs, Graph, Tapes
from bigstep.gpu.copies import WeightCopies
from bigstep.gpu.loss_scale import LossScale
from bigstep.gpu.tensor_lists import global_norm, same_memory_order
from bigstep.gpu.transform import groups_of
from bigstep.gpu.update import GraphUpdate, GroupSettings, make_update
from bigstep.nested import leaves, map_tensors
from bigstep.tables.precisions import PRECISIONS, find_precision

__all__ = ["GraphedStep"]

WARM_UP = 3
"""Runs before a capture, in which libraries choose their algorithms and kernels are compiled."""


@dataclass
class _Captured:
    """One captured step and the memory that it reads and writes."""

    graph: Graph
    inputs: Any
    targets: Tensor
    loss: Tensor
    gradients: list[Tensor]
    update: GraphUpdate


class GraphedStep:
    """Train with one graph launch per step: a graph for each shape of batch, captured when the shape is first seen.

    Weights keep their precision; in fp16 and bf16, convolutions and linear layers compute with copies that the update
    rewrites. With fp16 the loss is scaled; a step whose gradients are not finite changes nothing and halves the scale.
    All of this is decided on the device.

    `step(inputs, targets)` takes a step. For a batch in parts, call `add` for each part, which uses no graph, and then
    `update` once. The rate, and any other setting that the optimizer lists in `changing`, may change between steps as
    usual, through `optimizer.param_groups[i]["lr"]`. Other settings of an optimizer that is in the graph are fixed when
    it is captured; other groups of `set_groups`, and another rule of the loss scale, make another graph. A state dict
    may be loaded at any time; after one of the optimizer, graphs are captured anew.

    Args:
        model: In training mode; best after `bigstep.gpu.optimize`.
        loss: loss(outputs, targets) -> 0-dim tensor, a mean over what counts.
        optimizer: Those of `bigstep.optim` and torch's with `fused=True` become part of the graph; any other updates
            after it, and with fp16 the host then waits for each step.
        precision: "fp16", "bf16", "float32" or "float64".
        scale: The initial loss scale of fp16, or a `LossScale` to share with other steps.
        growth_interval: Good steps after which the scale is doubled.
        clip: The norm to which a longer gradient of all weights is shortened, after unscaling.
        compiled: Let `torch.compile` fuse forward, loss and backward before they are captured.
        emulate: Run on any device, through a tape that behaves as a graph does: for tests, not for speed. Nothing is
            compiled then, since a tape records operations rather than kernels.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = GraphedStep(model, nn.MSELoss(), optimizer, precision="float32", emulate=True)
    >>> losses = [float(step(torch.ones(4, 2), torch.ones(4, 1))) for _ in range(20)]
    >>> losses[-1] < 0.01 * losses[0]
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        optimizer: Optimizer,
        *,
        precision: str = "fp16",
        scale: float | LossScale = PRECISIONS["fp16"].loss_scale,
        growth_interval: int = PRECISIONS["fp16"].growth_interval,
        clip: float | None = None,
        compiled: bool = False,
        emulate: bool = False,
    ) -> None:
        """See the class."""
        arithmetic = find_precision(precision)
        if clip is not None and not clip > 0:
            raise ConfigError(
                f"GraphedStep was given clip={clip}, but it must be greater than 0; leave it out for no clipping."
            )
        self.model, self.loss, self.optimizer, self.clip = model, loss, optimizer, clip
        self.dtype = getattr(torch, arithmetic.products)
        self.params: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        if not self.params or not (emulate or all(p.is_cuda for p in self.params)):
            raise ConfigError("GraphedStep needs a model on a CUDA device; move it with model.cuda() first.")
        self.device = self.params[0].device
        self._evaluate = torch.compile(self._loss_of, dynamic=False) if compiled and not emulate else self._loss_of
        self._graph_maker = Tapes() if emulate else CudaGraphs(self.device)
        self.copies = WeightCopies(model, self.params, self.dtype)
        wide = torch.float64 if self.params[0].dtype == torch.float64 else torch.float32
        # on a GPU, torch's fused kernels and ours read fp32 rates, whatever the precision of the weights
        self._settings = GroupSettings(optimizer, self.device, torch.float32 if self.device.type == "cuda" else wide)
        scaled = arithmetic.loss_scale > 0
        self.loss_scale = (
            scale
            if isinstance(scale, LossScale)
            else LossScale(self.device, enabled=scaled, scale=scale, growth_interval=growth_interval)
        )
        self._factor = torch.ones((), dtype=wide, device=self.device)
        self._captured: dict[tuple[object, ...], _Captured] = {}
        self._sums: list[Tensor] = []  # allocated once, so that the table of addresses is written once
        self._parts = 0
        self._update_of_sums: GraphUpdate | None = None
        self._hook = optimizer.register_load_state_dict_post_hook(self._forget_graphs)

    def __call__(self, inputs: Any, targets: Tensor) -> Tensor:
        """Take one step and return its loss, on the device: reading it waits for the step.

        Args:
            inputs: What the model takes: a tensor, or a dict, tuple or list of tensors.
            targets: What the loss takes beside the model's outputs.
        """
        self._prepare()
        kinds = tuple((part.shape, part.dtype) for part in (*leaves(inputs), targets))
        key = (kinds, groups_of(self.model), *self.loss_scale.rule.values())
        if key not in self._captured:
            try:
                self._captured[key] = self._capture(inputs, targets)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # such as a model that reads a value on the host: no graph can hold that
                if not self._runs_without_graph(inputs, targets):
                    raise
                reason = str(error).strip().splitlines()[0]
                raise ConfigError(
                    f"This step cannot be one CUDA graph ({reason}); train with kernels=plain instead."
                ) from error
        captured = self._captured[key]
        map_tensors(lambda mine, given: mine.copy_(given, non_blocking=True), captured.inputs, inputs)
        captured.targets.copy_(targets, non_blocking=True)
        captured.graph.replay()
        if not captured.update.in_graph:
            self._apply(captured.update, captured.gradients)
        self.copies.note()
        return captured.loss.clone()

    def add(self, inputs: Any, targets: Tensor, weight: float) -> Tensor:
        """Add `weight` times the gradient of one part of a batch and return the part's loss; `update` ends the step.

        Args:
            inputs: The inputs of this part.
            targets: The targets of this part.
            weight: Counted targets in this part / counted targets in the batch.
        """
        self._prepare()
        loss, gradients = self._forward_backward(map_tensors(self._static_copy, inputs), targets.to(self.device))
        if not self._sums:
            self._sums = [torch.empty_like(p, memory_format=torch.preserve_format) for p in self.params]
        if self._parts == 0:
            torch._foreach_zero_(self._sums)
        wide = [g.to(p.dtype) for g, p in zip(gradients, self.params, strict=True)]
        torch._foreach_add_(self._sums, wide, alpha=weight)
        self._parts += 1
        return loss

    @property
    def gathered(self) -> list[Tensor]:
        """The sums that `add` has gathered: the gradients of the weights, in their order, times `scale`."""
        return self._sums

    def update(self) -> None:
        """Update the weights with what `add` gathered."""
        assert self._parts, "a batch in parts needs at least one"
        self._parts = 0
        self._prepare()
        if self._update_of_sums is None:  # not a graph's: its table keeps that graph's addresses
            self._update_of_sums = self._make_update()
        self._update_of_sums.bind(self._sums)
        self._apply(self._update_of_sums, self._sums)
        self.copies.note()

    @property
    def scale(self) -> Tensor:
        """The factor that the loss is multiplied by, on the device."""
        return self.loss_scale.value

    @property
    def skipped(self) -> Tensor:
        """1 if the last step was skipped, on the device."""
        return self.loss_scale.skipped

    def scaler_state(self) -> dict[str, Any]:
        """The loss scale, in the form of a `torch.amp.GradScaler` state."""
        return self.loss_scale.state_dict()

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Continue with a state of `scaler_state` or of a `GradScaler`; an empty state changes nothing."""
        self.loss_scale.load_state_dict(state)

    def rehearse(self) -> None:
        """Run forward and backward of the newest graph once outside it, without side effects, for a profile to see."""
        captured = next(reversed(self._captured.values()), None)
        if captured is not None:
            with self._untouched():
                self._forward_backward(captured.inputs, captured.targets)

    def refresh(self) -> None:
        """Rewrite the low-precision copies from the weights.

        A step does this by itself after a state dict is loaded or torch's operations change a weight. Call it after
        changes that torch's version counters do not see, through `param.data` or a kernel.
        """
        self.copies.rewrite()

    def close(self) -> None:
        """Free the memory of the graphs; a hook in the optimizer, which may live on, would keep them alive."""
        self._hook.remove()
        self._captured.clear()

    def _prepare(self) -> None:
        """Bring the copies and settings up to date with the weights and parameter groups."""
        self.copies.rewrite_if_changed()
        self._settings.write()

    def _forget_graphs(self, optimizer: Optimizer) -> None:
        """Drop the graphs: they hold the tensors of the optimizer's state, and loading a state dict replaces those."""
        self._captured.clear()
        self._update_of_sums = None

    def _make_update(self) -> GraphUpdate:
        return make_update(self.optimizer, self.params, self.copies.each)

    def _loss_of(self, swapped: dict[str, Tensor], inputs: Any, targets: Tensor) -> Tensor:
        """The loss, with some of the weights replaced by their copies."""
        return self.loss(torch.func.functional_call(self.model, swapped, (inputs,)), targets)

    def _forward_backward(self, inputs: Any, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        with self._autocast():
            loss = self._evaluate(self.copies.by_name, inputs, targets)
        wide_loss = loss if loss.dtype == torch.float64 else loss.float()
        gradients = torch.autograd.grad(self.loss_scale.scale(wide_loss), self.copies.leaves)
        return loss.detach(), [_laid_out(g, p) for g, p in zip(gradients, self.params, strict=True)]

    def _autocast(self) -> torch.autocast:
        half = self.dtype in (torch.float16, torch.bfloat16)
        return torch.autocast(self.device.type, self.dtype if half else None, enabled=half, cache_enabled=False)

    def _static_copy(self, part: Tensor) -> Tensor:
        """Copy an input tensor in the type and layout that the network needs; tokens stay integers."""
        dtype = self.dtype if part.is_floating_point() else part.dtype
        images = part.is_floating_point() and part.dim() == 4
        order = torch.channels_last if images else torch.contiguous_format
        return torch.empty(part.shape, dtype=dtype, device=self.device, memory_format=order).copy_(part)

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """Restore buffers, such as running statistics, and random number generators afterwards."""
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                yield
        finally:
            for buffer, before in kept:
                buffer.copy_(before)

    def _runs_without_graph(self, inputs: Any, targets: Tensor) -> bool:
        """Whether torch can take this forward and backward outside a graph; if not, no other setting would help."""
        try:
            with self._untouched(), self._autocast():
                loss = self._loss_of({}, map_tensors(self._static_copy, inputs), targets.to(self.device))
                torch.autograd.grad(loss, self.params, allow_unused=True)
        except RuntimeError:
            return False
        return True

    def _capture(self, inputs: Any, targets: Tensor) -> _Captured:
        inputs, targets = map_tensors(self._static_copy, inputs), targets.to(self.device, copy=True)
        update = self._make_update()

        def rehearse() -> None:
            for _ in range(WARM_UP):
                _, gradients = self._forward_backward(inputs, targets)
            if update.in_graph:
                update.bind(gradients)
                update.launch(gradients, self._settings.values, self._factor, torch.ones_like(self.skipped))

        def run() -> tuple[Tensor, list[Tensor]]:
            loss, gradients = self._forward_backward(inputs, targets)
            if update.in_graph:
                self._apply(update, gradients)
            return loss, gradients

        with self._untouched():
            self._graph_maker.warm_up(rehearse)
            graph, (loss, gradients) = self._graph_maker.capture(run)
        update.bind(gradients)  # their addresses are known only now; the graph reads them at replay
        return _Captured(graph, inputs, targets, loss, gradients, update)

    def _apply(self, update: GraphUpdate, gradients: list[Tensor]) -> None:
        """Unscale, clip, update, and adapt the loss scale."""
        scaled = self.loss_scale.enabled
        if scaled or self.clip is not None:
            self._look_at(gradients)
        factor = self._factor if scaled or self.clip is not None else None
        update.launch(gradients, self._settings.values, factor, self.skipped if scaled else None)
        self.loss_scale.update()

    @torch.no_grad()
    def _look_at(self, gradients: list[Tensor]) -> None:
        """Set the factor that unscales and clips, and the flag to skip; gradients count as finite if their norm is."""
        norm = global_norm(gradients, self._factor.dtype)
        self._factor.copy_(self.scale).reciprocal_()
        if self.loss_scale.enabled:
            self.skipped.copy_(norm - norm != 0)  # norm - norm is 0 if norm is finite, else NaN
        if self.clip is not None:
            # as torch.nn.utils.clip_grad_norm_ does
            self._factor.mul_((self.clip / (norm * self._factor + 1e-6)).clamp(max=1.0))


def _laid_out(gradient: Tensor, param: Tensor) -> Tensor:
    """The gradient in the memory order of its parameter, at an address that is aligned to 16 bytes.

    Almost all gradients are so already; one that is part of a larger tensor may begin anywhere.
    """
    if same_memory_order(gradient, param) and gradient.data_ptr() % 16 == 0:
        return gradient
    return torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)
