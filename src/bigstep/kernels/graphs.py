"""A whole training step as one CUDA graph: forward, backward, loss scaling and the optimizer, without the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigstep.errors import ConfigError
from bigstep.kernels.lars import LarsKernels, LarsSettings, same_memory_order, why_not_lars_kernels
from bigstep.kernels.transform import groups_of

__all__ = ["GraphedStep"]

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
WARM_UP = 3
"""Runs before a capture: libraries choose their algorithms, kernels are compiled."""


@dataclass
class _Graph:
    """One captured step and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    labels: Tensor
    loss: Tensor
    kernels: LarsKernels | None
    gradients: list[Tensor]


class GraphedStep:
    """Train with one graph launch a step: a graph for each shape of batch, made when the shape is first seen.

    Weights stay fp32; convolutions and linear layers compute with copies in `precision`, rewritten by the update itself
    (LARS) or after it. With fp16 the loss is scaled; a step whose gradients are not finite changes nothing and halves
    the scale. All of it is decided on the device.

    The rate may change between steps as usual, through `optimizer.param_groups[i]["lr"]`. Other settings of the
    optimizer are fixed in the graph, and so are the groups of `set_groups` (another number makes another graph). After
    loading a state dict call `refresh()`.

    Args:
        model: On a CUDA device, in training mode; best after `bigstep.kernels.optimize`.
        loss: loss(outputs, labels) -> 0-dim tensor.
        optimizer: `bigstep.optim.LARS`, or a torch optimizer with `fused=True`.
        precision: "fp16" or "bf16".
        scale: First loss scale of fp16.
        growth_interval: Good steps after which the scale is doubled.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Optimizer,
        *,
        precision: str = "fp16",
        scale: float = 1024.0,
        growth_interval: int = 2000,
    ) -> None:
        """See the class."""
        if precision not in PRECISIONS:
            raise ConfigError(f"GraphedStep was given precision={precision!r}; allowed are 'fp16' and 'bf16'.")
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.dtype = PRECISIONS[precision]
        self.growth_interval = growth_interval
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not params or not all(p.is_cuda for p in params):
            raise ConfigError("GraphedStep needs a model on a CUDA device; move it with model.cuda() first.")
        self.is_lars = "trust_coefficient" in optimizer.defaults
        if not self.is_lars and not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ConfigError(
                f"GraphedStep cannot put {type(optimizer).__name__} into a graph; "
                "use LARS or a torch optimizer with fused=True."
            )
        self.params: list[Tensor] = params
        self.device = params[0].device
        self.copies = self._low_precision_copies()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.rates = torch.zeros(len(optimizer.param_groups), dtype=torch.float32, device=self.device)
        self.scale = torch.tensor(scale if precision == "fp16" else 1.0, dtype=torch.float32, device=self.device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=self.device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=self.device)
        self._prepare_optimizer()
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._last_rates: list[float] = []

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take one step and return its loss (on the device; reading it waits for the step)."""
        key = (images.shape, labels.shape, groups_of(self.model))
        if key not in self._graphs:
            self._graphs[key] = self._capture(images, labels)
        captured = self._graphs[key]
        captured.images.copy_(images, non_blocking=True)
        captured.labels.copy_(labels, non_blocking=True)
        self._set_rates()
        captured.graph.replay()
        return captured.loss.clone()

    @torch.no_grad()
    def refresh(self) -> None:
        """Rewrite the low-precision copies from the weights, after these were changed from outside."""
        for param in self.params:
            if id(param) in self.copies:
                self.copies[id(param)].copy_(param)

    def _low_precision_copies(self) -> dict[int, Tensor]:
        """Copies of the weights of convolutions and linear layers, by the identity of the weight."""
        kinds = (nn.Conv2d, nn.Linear)
        weights = {id(p) for m in self.model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
        return {
            id(p): p.detach().to(self.dtype, memory_format=torch.preserve_format, copy=True).requires_grad_()
            for p in self.params
            if id(p) in weights
        }

    def _prepare_optimizer(self) -> None:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                # A buffer that a first step would create could not be created inside a graph.
                if (group.get("momentum") or self.is_lars) and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if self.is_lars:
            reason = why_not_lars_kernels(self.params, self._velocities())
            if reason is not None:
                raise ConfigError(f"GraphedStep cannot run LARS: {reason}.")
            if len({(g["momentum"], g["nesterov"]) for g in self.optimizer.param_groups}) > 1:
                raise ConfigError("GraphedStep needs the same momentum and nesterov in all parameter groups of LARS.")

    def _velocities(self) -> list[Tensor]:
        return [self.optimizer.state[param]["momentum_buffer"] for param in self.params]

    def _set_rates(self) -> None:
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        if rates != self._last_rates:
            for index, rate in enumerate(rates):
                self.rates[index].fill_(rate)  # a kernel argument: no copy that the host would have to keep alive
            self._last_rates = rates

    def _lars_kernels(self) -> LarsKernels:
        settings = [
            LarsSettings(
                weight_decay=group["weight_decay"],
                adapt=group["adapt"],
                trust_coefficient=group["trust_coefficient"],
                eps=group["eps"],
                rate=index,
            )
            for index, group in enumerate(self.optimizer.param_groups)
            for _ in group["params"]
        ]
        group = self.optimizer.param_groups[0]
        return LarsKernels(
            self.params,
            self._velocities(),
            settings,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            copies=[self.copies.get(id(p)) for p in self.params],
            narrow=self.dtype,
        )

    def _forward_backward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaves = [self.copies.get(id(p), p) for p in self.params]
        swapped = {self.names[id(p)]: self.copies[id(p)] for p in self.params if id(p) in self.copies}
        with torch.autocast(self.device.type, self.dtype, cache_enabled=False):
            outputs = torch.func.functional_call(self.model, swapped, (images,))
            loss = self.loss(outputs, labels)
        gradients = torch.autograd.grad(loss.float() * self.scale, leaves)
        return loss.detach(), [_laid_out(g, p) for g, p in zip(gradients, self.params, strict=True)]

    def _capture(self, images: Tensor, labels: Tensor) -> _Graph:
        channels_last = {"memory_format": torch.channels_last} if images.dim() == 4 else {}
        static_images = torch.empty(images.shape, dtype=self.dtype, device=self.device, **channels_last)  # type: ignore[call-overload]  # a dict hides the types
        static_images.copy_(images)
        static_labels = labels.to(self.device, copy=True)
        kernels = self._lars_kernels() if self.is_lars else None
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                _, gradients = self._forward_backward(static_images, static_labels)
            self._update(kernels, gradients, warm_up=True)
            del gradients
        torch.cuda.current_stream(self.device).wait_stream(stream)
        for buffer, before in buffers:  # warming up must leave no trace in the running statistics
            buffer.copy_(before)
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps a workspace for each stream. One from outside could be freed while the graph still writes to it
        # (torch.compile's own graphs do that), so the graph takes a new one from its own pool and leaves it there.
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.graph(graph, pool=self._pool):
            loss, gradients = self._forward_backward(static_images, static_labels)
            self._update(kernels, gradients, warm_up=False)
        torch._C._cuda_clearCublasWorkspaces()
        if kernels is not None:
            kernels.bind(gradients)  # only now are their addresses known; the graph reads the table when it runs
        return _Graph(graph, static_images, static_labels, loss, kernels, gradients)

    def _update(self, kernels: LarsKernels | None, gradients: list[Tensor], *, warm_up: bool) -> None:
        if kernels is not None:
            scale, good_steps = self.scale, self.good_steps if self.dtype == torch.float16 else None
            if warm_up:
                kernels.bind(gradients)
                scale = torch.full_like(scale, float("nan"))  # makes every norm nan: the step is skipped
                good_steps = None if good_steps is None else good_steps.clone()
            interval = self.growth_interval
            kernels.launch(self.rates, scale=scale, good_steps=good_steps, growth_interval=interval, aligned=True)
            self.skipped.copy_(kernels.skipped)
            return
        self._torch_update(gradients, warm_up)

    @torch.no_grad()
    def _torch_update(self, gradients: list[Tensor], warm_up: bool) -> None:
        wide = [g.float() for g in gradients]
        self.skipped.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(wide, self.skipped, self.scale.reciprocal())
        if warm_up:
            self.skipped.fill_(1.0)
        for param, gradient in zip(self.params, wide, strict=True):
            param.grad = gradient
        optimizer: Any = self.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.grad_scale, optimizer.found_inf = None, self.skipped
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = self.rates[index]
        try:
            optimizer.step()
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            del optimizer.grad_scale, optimizer.found_inf
        for param in self.params:
            param.grad = None
        copied = [p for p in self.params if id(p) in self.copies]
        torch._foreach_copy_([self.copies[id(p)] for p in copied], copied)
        if self.dtype == torch.float16 and not warm_up:
            torch._amp_update_scale_(self.scale, self.good_steps, self.skipped, 2.0, 0.5, self.growth_interval)


def _laid_out(gradient: Tensor, param: Tensor) -> Tensor:
    """The gradient with the memory order of its parameter; almost always it has that already."""
    same = same_memory_order(gradient, param)
    return gradient if same else torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)
