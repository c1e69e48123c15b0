"""What the update rules share: they update all tensors of a group together, in a few launches if they have kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigstep.errors import ConfigError
from bigstep.gpu.backend import why_not_triton
from bigstep.gpu.tensor_lists import by_device_and_dtype, laid_out_like, narrow_type
from bigstep.gpu.update import GraphUpdate

__all__ = ["MultiTensorOptimizer", "descend", "with_gradient"]


class MultiTensorOptimizer(Optimizer):
    """An optimizer that updates lists of tensors; a subclass, the rule, says how in `_update` and `_buffers`."""

    changing: Sequence[str] = ("lr",)
    """Settings of a group that may change from step to step; the graph of a whole step reads them from the device."""
    has_kernels = False
    """Whether the rule has kernels for CUDA devices; `_kernels` makes them."""
    squares = True
    """Whether the rule squares gradients by element; complex ones, whose square is no length, are then refused."""
    _kept: tuple[object, GraphUpdate] | None = None
    """The tensors and settings of the last step on a CUDA device, and the kernels made for them."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, unless its settings or parameters are invalid: then it is refused."""
        super().add_param_group(param_group)
        try:
            self._require(self.param_groups[-1])
        except ConfigError:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; settings that it lacks keep their values, and invalid ones are refused."""
        saved = state_dict["param_groups"]
        if len(saved) == len(self.param_groups):  # else torch raises
            own = [{name: group[name] for name in self.defaults if name in group} for group in self.param_groups]
            saved = [{**settings, **group} for settings, group in zip(own, saved, strict=True)]
            for group, taken in zip(self.param_groups, saved, strict=True):
                self._require({**taken, "params": group["params"]})
        super().load_state_dict({**state_dict, "param_groups": saved})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # one form
        """Take one step; `closure`, if given, computes the loss and the gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._step_in_kernels():
            for group in self.param_groups:
                for params, grads in by_device_and_dtype(*with_gradient(group["params"])):
                    self._update(group, params, grads)
        return loss

    def create_state(self) -> None:
        """Create all buffers now rather than in the first step: a CUDA graph can only use existing memory."""
        for group in self.param_groups:
            for param in group["params"]:
                self._buffers(group, param)

    def graph_update(self, params: Sequence[Tensor], copies: Sequence[Tensor | None]) -> GraphUpdate | None:
        """Return kernels that update `params` and rewrite `copies` inside a whole-step graph; None if there are none.

        Args:
            params: Weights of this optimizer's groups.
            copies: For each weight its low-precision copy, or None.
        """
        narrow = narrow_type([copy for copy in copies if copy is not None])
        return self._kernels(params, copies, narrow) if self.has_kernels and narrow is not None else None

    def _require(self, group: Mapping[str, Any]) -> None:
        """Refuse a group with invalid settings; settings that the rule does not have are not checked."""
        for name in filter(group.__contains__, ("lr", "weight_decay", "eps", "rest_lr", "rms_lr")):
            if name == "lr" and isinstance(group["lr"], Tensor):
                self._expect(group, "lr", group["lr"].ndim == 0, "a number or a tensor without dimensions")
            else:
                self._expect(group, name, _lies_below(group[name], math.inf), "a finite number of at least 0")
        for name in filter(group.__contains__, ("momentum", "rms_decay")):
            self._expect(group, name, _lies_below(group[name], 1), "a number of at least 0 and less than 1")
        if "betas" in group:
            betas = group["betas"]
            fits = isinstance(betas, Sequence) and len(betas) == 2 and all(_lies_below(beta, 1) for beta in betas)
            self._expect(group, "betas", fits, "two numbers of at least 0 and less than 1")
        shapes = [tuple(param.shape) for param in group["params"] if param.is_complex()]
        if self.squares and shapes:
            rule = type(self).__name__
            raise ConfigError(f"{rule} was given complex numbers of shape {shapes[0]}; store them as real ones.")

    def _expect(self, group: Mapping[str, Any], name: str, fits: bool, allowed: str) -> None:
        if not fits:
            rule = type(self).__name__
            raise ConfigError(f"{rule} was given {name}={group[name]!r:.60}, but it must be {allowed}.")

    def _update(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Update some parameters of a group, all of one device and dtype, in place; leave the gradients unchanged."""
        raise NotImplementedError

    def _buffers(self, group: Mapping[str, Any], param: Tensor) -> Sequence[Tensor]:
        """The buffers of a parameter, created if they do not exist."""
        raise NotImplementedError

    def _zeros(self, param: Tensor, *names: str) -> list[Tensor]:
        """Buffers of a parameter, created with zeros if they do not exist."""
        state = self.state[param]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return [state[name] for name in names]

    def _count(self, param: Tensor) -> Tensor:
        """The number of steps that a parameter has taken, on its device so that a graph can count."""
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        elif state["step"].device != param.device:  # torch leaves it on the device of the state dict
            state["step"] = state["step"].to(param.device)
        count: Tensor = state["step"]
        return count

    def _lists(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        """The buffers of these parameters, a list for each kind of buffer."""
        groups = {param: group for group in self.param_groups for param in group["params"]}
        rows = [self._buffers(groups[param], param) for param in params]
        return [list(column) for column in zip(*rows, strict=True)]

    def _kernels(
        self, params: Sequence[Tensor], copies: Sequence[Tensor | None] | None, narrow: torch.dtype
    ) -> GraphUpdate | None:
        """Kernels for these tensors; None if there are none for them."""
        raise NotImplementedError

    def _step_in_kernels(self) -> bool:
        """Update all groups together through the rule's kernels if they take the tensors; return whether they did."""
        if not self.has_kernels:
            return False
        params, grads = with_gradient(param for group in self.param_groups for param in group["params"])
        if not params or why_not_triton(params[0]) is not None or (narrow := narrow_type(grads)) is None:
            return False
        places = [tensor.data_ptr() for tensors in (params, *self._lists(params)) for tensor in tensors]
        settings = [[v for name, v in group.items() if name not in ("params", "lr")] for group in self.param_groups]
        if self._kept is None or self._kept[0] != (places, settings, narrow):
            made = self._kernels(params, None, narrow)
            if made is None:
                return False
            self._kept = (places, settings, narrow), made
        kernels, laid_out = self._kept[1], laid_out_like(params, grads)
        kernels.bind(laid_out)
        # filled on the device: a copy from the host would make the host wait
        rates = [torch.zeros(1, device=params[0].device).add_(group["lr"]) for group in self.param_groups]
        kernels.launch(laid_out, {"lr": torch.cat(rates)})
        return True

    def _each(self, params: Sequence[Tensor], *names: str) -> list[dict[str, Any]]:
        """For each parameter these settings of its group, and the index of the group as `rate`."""
        of = {
            param: {"rate": index, **{name: group[name] for name in names}}
            for index, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        return [of[param] for param in params]


def _lies_below(value: object, end: float) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < end


def with_gradient(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and their gradients; those without a gradient are left out, sparse gradients made dense.

    >>> used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> used.sum().backward()
    >>> with_gradient([used, unused])
    ([tensor([1., 1.], requires_grad=True)], [tensor([1., 1.])])
    """
    found = [(param, param.grad) for param in params if param.grad is not None]
    # a norm over the stored values of a sparse gradient would be wrong where rows repeat
    return [param for param, _ in found], [grad.to_dense() if grad.is_sparse else grad for _, grad in found]


def descend(params: list[Tensor], steps: list[Tensor], lr: float | Tensor) -> None:
    """Subtract lr * step from each parameter in place; `steps` are not changed.

    >>> weight = torch.ones(2)
    >>> descend([weight], [torch.tensor([1.0, 2.0])], torch.tensor(0.5))
    >>> weight
    tensor([0.5000, 0.0000])
    """
    if isinstance(lr, Tensor):  # as `alpha` it would have to be read on the host
        torch._foreach_sub_(params, torch._foreach_mul(steps, lr))
    else:
        torch._foreach_add_(params, steps, alpha=-lr)
