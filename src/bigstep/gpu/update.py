"""How an optimizer takes part in the graph of a whole step: the protocol, and the path through its own `step()`.

An optimizer may offer `graph_update(params, copies)`, which returns kernels that are a `GraphUpdate`, or None if they
cannot take these tensors; for torch's fused AdamW `bigstep.gpu.lamb` has such kernels. Any other optimizer goes through
`StepUpdate`, which calls its `step()`:

- inside the graph, if it decides on the device whether to skip (torch's `fused=True`, Muon), or if it has a
  `create_state()` that makes all its buffers in advance;
- otherwise after the graph; with a scaled loss the host then waits for each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigstep.gpu.lamb import adamw_kernels
from bigstep.gpu.loss_scale import decides_on_device, step_unless
from bigstep.gpu.tensor_lists import by_device_and_dtype

__all__ = ["GraphUpdate", "GroupSettings", "StepUpdate", "make_update"]


class GraphUpdate(Protocol):
    """One update of all weights and of their low-precision copies."""

    in_graph: bool
    """Whether `launch` can be captured in the graph; if not, it is called after each replay."""

    def bind(self, gradients: Sequence[Tensor]) -> None:
        """Record the addresses of the gradients, which may become known only after the graph is captured."""
        ...

    def launch(
        self,
        gradients: Sequence[Tensor],
        settings: Mapping[str, Tensor],
        factor: Tensor | None = None,
        skipped: Tensor | None = None,
    ) -> None:
        """Update with `factor` times the gradients; change nothing if `skipped` is 1.

        Args:
            gradients: As given to `bind`.
            settings: Settings that may change from step to step, by name: an element for each parameter group.
            factor: Undoes the loss scale and clips the gradients; None means 1.
            skipped: 0 or 1; None means 0.
        """
        ...


def make_update(optimizer: Optimizer, params: Sequence[Tensor], copies: Sequence[Tensor | None]) -> GraphUpdate:
    """The update of an optimizer: kernels if there are any for it and these tensors, otherwise its `step()`.

    Args:
        optimizer: Any optimizer.
        params: The trained weights, in the order of its groups.
        copies: For each weight its low-precision copy, or None.
    """
    make = getattr(optimizer, "graph_update", None)
    offered: GraphUpdate | None = adamw_kernels(optimizer, params, copies) if make is None else make(params, copies)
    return StepUpdate(optimizer, params, copies) if offered is None else offered


class StepUpdate:
    """An update through `optimizer.step()`."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        self.optimizer: Any = optimizer
        self.params = list(params)
        self.copied = [(copy, param) for copy, param in zip(copies, params, strict=True) if copy is not None]
        self.skips_by_itself = decides_on_device(optimizer)
        self.in_graph = self.skips_by_itself or hasattr(optimizer, "create_state")
        self._create_state()

    def _create_state(self) -> None:
        """Make the buffers that a first step would make: made inside a graph, they would be reset by each replay.

        Torch's fused Adam makes its buffers in the skipped step of the warm-up; its SGD would leave them uninitialized.
        """
        if hasattr(self.optimizer, "create_state"):
            self.optimizer.create_state()
        elif self.in_graph and isinstance(self.optimizer, torch.optim.SGD):
            for group in self.optimizer.param_groups:
                for param in group["params"] if group["momentum"] else ():
                    state = self.optimizer.state[param]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def bind(self, gradients: Sequence[Tensor]) -> None:
        """Do nothing: each launch is given the gradients."""

    @torch.no_grad()
    def launch(
        self,
        gradients: Sequence[Tensor],
        settings: Mapping[str, Tensor],
        factor: Tensor | None = None,
        skipped: Tensor | None = None,
    ) -> None:
        """See `GraphUpdate`."""
        wide = self._widened(gradients, factor)
        for param, gradient in zip(self.params, wide, strict=True):
            param.grad = gradient
        try:
            if self.in_graph:
                self._step_on_device(settings, skipped)
            elif skipped is None or not float(skipped):
                self.optimizer.step()
        finally:
            for param in self.params:
                param.grad = None
        if self.copied:
            copies, params = zip(*self.copied, strict=True)
            torch._foreach_copy_(copies, params)

    def _widened(self, gradients: Sequence[Tensor], factor: Tensor | None) -> list[Tensor]:
        """`factor` times the gradients, in the types of the parameters; those that need no change are not copied."""
        wide = [
            g if factor is None and g.dtype == p.dtype else torch.empty_like(p)
            for g, p in zip(gradients, self.params, strict=True)
        ]
        made = [(g, w) for g, w in zip(gradients, wide, strict=True) if w is not g]
        # in lists of one type each: a mixed list would take a launch per tensor
        for alike, places in by_device_and_dtype([g for g, _ in made], [w for _, w in made]):
            torch._foreach_copy_(places, alike)
        if factor is not None:
            torch._foreach_mul_(wide, factor)
        return wide

    def _step_on_device(self, settings: Mapping[str, Tensor], skipped: Tensor | None) -> None:
        with self._settings_on_device(settings):
            if skipped is None:
                self.optimizer.step()
            elif self.skips_by_itself:
                step_unless(skipped, self.optimizer)
            else:
                changed = self.params + [t for param in self.params for t in self.optimizer.state[param].values()]
                before = [torch.empty_like(tensor) for tensor in changed]
                torch._foreach_copy_(before, changed)
                self.optimizer.step()
                for tensor, old in zip(changed, before, strict=True):
                    torch.where(skipped > 0, old, tensor, out=tensor)

    @contextlib.contextmanager
    def _settings_on_device(self, settings: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the optimizer read from the device the settings that change from step to step."""
        groups = self.optimizer.param_groups
        capturable = {"capturable": True} if "capturable" in self.optimizer.defaults else {}  # Adam requires it
        on_host = [{name: group[name] for name in (*settings, *capturable)} for group in groups]
        # float64 weights need float64 settings, since the optimizer derives values such as 1 - rate * decay from them;
        # torch's fused kernels take float32 only
        if self.params[0].dtype == torch.float64 and not any(group.get("fused") for group in groups):
            settings = {name: values.double() for name, values in settings.items()}
        for index, group in enumerate(groups):
            group.update(capturable, **{name: values[index] for name, values in settings.items()})
        try:
            yield
        finally:
            for group, kept in zip(groups, on_host, strict=True):
                group.update(kept)


class GroupSettings:
    """The settings of each parameter group that may change from step to step, on the device where a graph reads them.

    These are the names in the optimizer's `changing`; without it, the rate.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    >>> settings = GroupSettings(optimizer, torch.device("cpu"), torch.float32)
    >>> settings.write()
    >>> settings.values
    {'lr': tensor([0.5000])}
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> None:
        self.optimizer = optimizer
        names: Sequence[str] = getattr(optimizer, "changing", ("lr",))
        self.values = {name: torch.zeros(len(optimizer.param_groups), dtype=dtype, device=device) for name in names}
        self._written: dict[str, list[float]] = {}

    def write(self) -> None:
        """Bring the values on the device up to date with the groups."""
        for name, on_device in self.values.items():
            values = [float(group[name]) for group in self.optimizer.param_groups]
            if values != self._written.get(name):
                for index, value in enumerate(values):
                    on_device[index].fill_(value)  # a kernel argument: no host buffer to keep alive
                self._written[name] = values
