"""The loss scale of fp16 training, kept on the device and shared by graphed and eager steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigstep.gpu.tensor_lists import by_device_and_dtype
from bigstep.tables.precisions import PRECISIONS

__all__ = ["LossScale", "decides_on_device", "step_unless"]


class LossScale:
    """Multiply the loss so that small fp16 gradients do not underflow, and adapt the factor on the device.

    ::

        a gradient that is not finite:         the step is skipped,  scale <- max(scale / 2, floor)
        growth_interval good steps in a row:                         scale <- scale * 2

    It is called as `torch.amp.GradScaler` is, and each reads the state dicts of the other; the factors 2 and 1/2 are
    then those of the state. Unlike `GradScaler`, it has a floor, so that a run whose gradients never become finite
    again ends with a message about them rather than with a scale of 0; and its tensors exist from the start, at
    addresses that a CUDA graph can hold.

    Args:
        device: Where the gradients are.
        enabled: False makes every method behave as if there were no scale.
        scale: The first scale.
        growth_interval: Good steps after which the scale is doubled.
        floor: The smallest scale.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer, scale = torch.optim.SGD([weight], lr=0.5), LossScale(scale=8.0)
    >>> for loss in (weight.sum(), weight.sum() * float("inf")):
    ...     optimizer.zero_grad()
    ...     scale.scale(loss).backward()
    ...     scale.step(optimizer)
    ...     scale.update()
    ...     print(weight.item(), scale.get_scale())
    0.5 8.0
    0.5 4.0
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        enabled: bool = True,
        scale: float = PRECISIONS["fp16"].loss_scale,
        growth_interval: int = PRECISIONS["fp16"].growth_interval,
        floor: float = 1.0,
    ) -> None:
        self.enabled, self.floor = enabled, floor
        self.rule: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": growth_interval}
        """Numbers that a CUDA graph holds as they were when it was captured, by their names in a state."""
        self.value = torch.tensor(scale if enabled else 1.0, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        """1 if the gradients were not finite when they were last checked, else 0."""
        self._unscaled: set[int] = set()

    def is_enabled(self) -> bool:
        """Whether the loss is scaled at all."""
        return self.enabled

    def get_scale(self) -> float:
        """The scale as a number; on a GPU this waits for the device."""
        return float(self.value)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return loss * self.value if self.enabled else loss

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, at most once a step; call it before clipping, for example."""
        if not self.enabled or id(optimizer) in self._unscaled:
            return
        if not self._unscaled:
            self.skipped.zero_()
        inverse = self.value.reciprocal()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for (alike,) in by_device_and_dtype(gradients):
            torch._amp_foreach_non_finite_check_and_unscale_(alike, self.skipped, inverse)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer) -> None:
        """Unscale the gradients if that is still to be done, and update the weights unless a gradient is not finite.

        For an optimizer that does not decide on the device, the host waits for the flag.
        """
        self.unscale_(optimizer)
        if not self.enabled:
            optimizer.step()
        elif decides_on_device(optimizer):
            step_unless(self.skipped, optimizer)
        elif not float(self.skipped):
            optimizer.step()

    def update(self) -> None:
        """Halve the scale if the step was skipped, count it as good otherwise; call it at the end of each step."""
        self._unscaled.clear()
        if self.enabled:
            torch._amp_update_scale_(self.value, self.good_steps, self.skipped, *self.rule.values())
            self.value.clamp_(min=self.floor)

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of `torch.amp.GradScaler`; empty if nothing is scaled."""
        if not self.enabled:
            return {}
        return {"scale": float(self.value), **self.rule, "_growth_tracker": int(self.good_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this class or of a `GradScaler`; an empty state changes nothing."""
        if state and self.enabled:
            self.value.fill_(state["scale"])
            self.good_steps.fill_(state["_growth_tracker"])
            self.rule = {name: state.get(name, value) for name, value in self.rule.items()}


def decides_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer reads on the device if a step is to be skipped: torch's with `fused=True`, and Muon."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(skipped: Tensor, optimizer: Any) -> None:
    """Let an optimizer that `decides_on_device` take a step unless `skipped` is 1.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.ones(1)
    >>> optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    >>> step_unless(torch.tensor(1.0), optimizer)
    >>> weight.item()
    1.0
    """
    optimizer.grad_scale, optimizer.found_inf = None, skipped  # as torch's GradScaler passes it
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
