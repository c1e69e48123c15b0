"""A whole training step as one CUDA graph: forward, backward, loss scaling and the optimizer, without the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigstep.errors import ConfigError
from bigstep.gpu.lars import LarsKernels, LarsSettings, same_memory_order, why_not_lars_kernels
from bigstep.gpu.transform import groups_of

__all__ = ["GraphedStep"]

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "float32": torch.float32}
WARM_UP = 3
"""Runs before a capture: libraries choose their algorithms, kernels are compiled."""
CHANGING = ("lr", "blend")
"""Settings of a parameter group that may change from step to step; a graph reads them from the device."""


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

    `step(images, labels)` takes a step. A batch in parts is a call of `add` for each part, without graphs, and one of
    `update`. The rate (and the `blend` of RMSprop warm-up) may change between steps as usual, through
    `optimizer.param_groups[i]["lr"]`. Other settings of an optimizer that is in the graph are fixed there, and so are
    the groups of `set_groups` (another number makes another graph). State dicts must be loaded before the first step,
    since graphs hold the tensors that were there; call `refresh()` then.

    Args:
        model: On a CUDA device, in training mode; best after `bigstep.gpu.optimize`.
        loss: loss(outputs, labels) -> 0-dim tensor.
        optimizer: Those of `bigstep.optim` and torch's with `fused=True` become part of the graph; any other updates
            after it, and fp16 then makes the host wait for each step.
        precision: "fp16", "bf16" or "float32".
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
            raise ConfigError(f"GraphedStep was given precision={precision!r}; allowed are {', '.join(PRECISIONS)}.")
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.dtype = PRECISIONS[precision]
        self.growth_interval = growth_interval
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not params or not all(p.is_cuda for p in params):
            raise ConfigError("GraphedStep needs a model on a CUDA device; move it with model.cuda() first.")
        self.is_lars = "trust_coefficient" in optimizer.defaults
        # fused optimizers of torch read the rate, and whether to skip the step, on the device
        self.skips_by_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self.updates_in_graph = self.is_lars or self.skips_by_itself or hasattr(optimizer, "create_state")
        self.params: list[Tensor] = params
        self.device = params[0].device
        self.copies = self._low_precision_copies()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.settings = {
            name: torch.zeros(len(optimizer.param_groups), dtype=torch.float32, device=self.device)
            for name in CHANGING
            if name in optimizer.defaults
        }
        self.scale = torch.tensor(scale if precision == "fp16" else 1.0, dtype=torch.float32, device=self.device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=self.device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=self.device)
        self._prepare_optimizer()
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._last_settings: dict[str, list[float]] = {}
        self._sums: list[Tensor] = []  # made once, so that the table of their addresses is written once
        self._parts = 0
        self._kernels_of_sums: LarsKernels | None = None

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take one step and return its loss (on the device; reading it waits for the step)."""
        key = (images.shape, labels.shape, groups_of(self.model))
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(images, labels)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # a model that asks the device for a value, say, cannot be captured
                reason = str(error).strip().splitlines()[0]
                raise ConfigError(
                    f"This step cannot be one CUDA graph ({reason}); train with kernels=plain instead."
                ) from error
        captured = self._graphs[key]
        captured.images.copy_(images, non_blocking=True)
        captured.labels.copy_(labels, non_blocking=True)
        self._set_settings()
        captured.graph.replay()
        if not self.updates_in_graph:
            self._torch_update(captured.gradients)
        return captured.loss.clone()

    def add(self, images: Tensor, labels: Tensor, weight: float) -> Tensor:
        """Add `weight` times the gradient of one part of a batch, and return the part's loss; `update` ends the step.

        Args:
            images: Of this part.
            labels: Of this part.
            weight: Samples of this part / samples of the batch.
        """
        loss, gradients = self._forward_backward(self._input(images), labels)
        if not self._sums:
            self._sums = [torch.empty_like(p, memory_format=torch.preserve_format) for p in self.params]
        if self._parts == 0:
            torch._foreach_zero_(self._sums)
        torch._foreach_add_(self._sums, [g.float() for g in gradients], alpha=weight)
        self._parts += 1
        return loss

    @property
    def gathered(self) -> list[Tensor]:
        """What `add` has gathered: the gradients of the weights in their order, times `scale`."""
        return self._sums

    def update(self) -> None:
        """Update the weights with what `add` gathered."""
        assert self._parts, "a batch in parts needs at least one"
        self._parts = 0
        self._set_settings()
        if self.is_lars:
            if self._kernels_of_sums is None:  # of its own: a table that graphs read must keep their gradients
                self._kernels_of_sums = self._lars_kernels()
            self._kernels_of_sums.bind(self._sums)
            self._lars_update(self._kernels_of_sums)
        else:
            self._torch_update(self._sums)

    def scaler_state(self) -> dict[str, Any]:
        """The loss scale, as `torch.amp.GradScaler` keeps it in checkpoints."""
        return {
            "scale": float(self.scale),
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.good_steps),
        }

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Go on with a loss scale of `scaler_state` or of a `GradScaler`; an empty one changes nothing."""
        if state and self.dtype == torch.float16:
            self.scale.fill_(state["scale"])
            self.good_steps.fill_(state["_growth_tracker"])

    def rehearse(self) -> None:
        """Run forward and backward of the newest graph once more without it, and leave no trace: for a profile."""
        captured = next(reversed(self._graphs.values()), None)
        if captured is not None:
            buffers = [(b, b.clone()) for b in self.model.buffers()]
            self._forward_backward(captured.images, captured.labels)
            for buffer, before in buffers:
                buffer.copy_(before)

    @torch.no_grad()
    def refresh(self) -> None:
        """Rewrite the low-precision copies from the weights, after these were changed from outside."""
        for param in self.params:
            if id(param) in self.copies:
                self.copies[id(param)].copy_(param)

    def _low_precision_copies(self) -> dict[int, Tensor]:
        """Copies of the weights of convolutions and linear layers, by the identity of the weight."""
        if self.dtype == torch.float32:
            return {}
        kinds = (nn.Conv2d, nn.Linear)
        weights = {id(p) for m in self.model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
        return {
            id(p): p.detach().to(self.dtype, memory_format=torch.preserve_format, copy=True).requires_grad_()
            for p in self.params
            if id(p) in weights
        }

    def _prepare_optimizer(self) -> None:
        if not self.updates_in_graph:
            return
        # A buffer that a first step would create could not be created inside a graph.
        if hasattr(self.optimizer, "create_state"):
            self.optimizer.create_state()
            return
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
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

    def _set_settings(self) -> None:
        for name, on_device in self.settings.items():
            values = [float(group[name]) for group in self.optimizer.param_groups]
            if values != self._last_settings.get(name):
                for index, value in enumerate(values):
                    on_device[index].fill_(value)  # a kernel argument: no copy that the host would have to keep alive
                self._last_settings[name] = values

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
            narrow=torch.float16 if self.dtype == torch.float32 else self.dtype,
        )

    def _forward_backward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaves = [self.copies.get(id(p), p) for p in self.params]
        swapped = {self.names[id(p)]: self.copies[id(p)] for p in self.params if id(p) in self.copies}
        half = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype if half else None, enabled=half, cache_enabled=False):
            outputs = torch.func.functional_call(self.model, swapped, (images,))
            loss = self.loss(outputs, labels)
        gradients = torch.autograd.grad(loss.float() * self.scale, leaves)
        return loss.detach(), [_laid_out(g, p) for g, p in zip(gradients, self.params, strict=True)]

    def _input(self, images: Tensor) -> Tensor:
        """A copy of the images, as the network wants them."""
        channels_last = {"memory_format": torch.channels_last} if images.dim() == 4 else {}
        narrow = torch.empty(images.shape, dtype=self.dtype, device=self.device, **channels_last)  # type: ignore[call-overload]  # a dict hides the types
        return narrow.copy_(images)  # type: ignore[no-any-return]  # as above

    def _capture(self, images: Tensor, labels: Tensor) -> _Graph:
        self._prepare_optimizer()  # once more: a state dict may have been loaded that lacks something
        static_images = self._input(images)
        static_labels = labels.to(self.device, copy=True)
        kernels = self._lars_kernels() if self.is_lars else None
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                _, gradients = self._forward_backward(static_images, static_labels)
            if self.updates_in_graph:
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
            if self.updates_in_graph:
                self._update(kernels, gradients, warm_up=False)
        torch._C._cuda_clearCublasWorkspaces()
        if kernels is not None:
            kernels.bind(gradients)  # only now are their addresses known; the graph reads the table when it runs
        return _Graph(graph, static_images, static_labels, loss, kernels, gradients)

    def _update(self, kernels: LarsKernels | None, gradients: list[Tensor], *, warm_up: bool) -> None:
        if kernels is None:
            self._torch_update(gradients, warm_up)
            return
        if warm_up:
            kernels.bind(gradients)
        self._lars_update(kernels, warm_up)

    def _lars_update(self, kernels: LarsKernels, warm_up: bool = False) -> None:
        scale, good_steps = self.scale, self.good_steps if self.dtype == torch.float16 else None
        if warm_up:
            scale = torch.full_like(scale, float("nan"))  # makes every norm nan: the step is skipped
            good_steps = None if good_steps is None else good_steps.clone()
        interval = self.growth_interval
        kernels.launch(self.settings["lr"], scale=scale, good_steps=good_steps, growth_interval=interval, aligned=True)
        self.skipped.copy_(kernels.skipped)

    @torch.no_grad()
    def _torch_update(self, gradients: list[Tensor], warm_up: bool = False) -> None:
        wide = [g.float() for g in gradients]
        self.skipped.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(wide, self.skipped, self.scale.reciprocal())
        if warm_up:
            self.skipped.fill_(1.0)
        for param, gradient in zip(self.params, wide, strict=True):
            param.grad = gradient
        if self.updates_in_graph:
            self._step_on_device()
        elif self.dtype != torch.float16 or not float(self.skipped):  # only a scaled loss may overflow by design
            self.optimizer.step()
        for param in self.params:
            param.grad = None
        copied = [p for p in self.params if id(p) in self.copies]
        if copied:
            torch._foreach_copy_([self.copies[id(p)] for p in copied], copied)
        if self.dtype == torch.float16 and not warm_up:
            torch._amp_update_scale_(self.scale, self.good_steps, self.skipped, 2.0, 0.5, self.growth_interval)

    def _step_on_device(self) -> None:
        """Let the optimizer read what changes from step to step, and whether to skip this one, from the device."""
        optimizer: Any = self.optimizer
        on_host = [{name: group[name] for name in self.settings} for group in optimizer.param_groups]
        for index, group in enumerate(optimizer.param_groups):
            group.update({name: values[index] for name, values in self.settings.items()})
        if self.skips_by_itself:
            optimizer.grad_scale, optimizer.found_inf = None, self.skipped
            changed = []
        else:
            changed = self.params + [value for param in self.params for value in optimizer.state[param].values()]
        before = [tensor.clone() for tensor in changed]
        try:
            optimizer.step()
        finally:
            for group, settings in zip(optimizer.param_groups, on_host, strict=True):
                group.update(settings)
            if self.skips_by_itself:
                del optimizer.grad_scale, optimizer.found_inf
        skip = self.skipped > 0
        for tensor, old in zip(changed, before, strict=True):
            torch.where(skip, old, tensor, out=tensor)


def _laid_out(gradient: Tensor, param: Tensor) -> Tensor:
    """The gradient with the memory order of its parameter; almost always it has that already."""
    same = same_memory_order(gradient, param)
    return gradient if same else torch.empty_like(param, dtype=gradient.dtype).copy_(gradient)
