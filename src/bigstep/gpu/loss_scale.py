"""The loss scale of fp16 training, kept on the device: the one that graphed and eager steps share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigstep.gpu.tensor_lists import by_device_and_dtype
from bigstep.tables.precisions import PRECISIONS

__all__ = ["LossScale", "decides_on_device", "step_unless"]

GROWTH, BACKOFF = 2.0, 0.5


class LossScale:
    """Multiply the loss so that small fp16 gradients survive, and learn on the device how far one can go.

    ::

        a gradient that is not finite:      the step is skipped,  scale <- max(scale / 2, floor)
        growth_interval good steps running:                       scale <- scale * 2

    It is called as `torch.amp.GradScaler` is, and each reads the state dicts of the other. Unlike that one it has a
    floor, so that a run whose gradients are broken for good ends with a message about them and not with a scale of 0;
    and its tensors exist from the start, at addresses that a CUDA graph can hold.

    Args:
        device: Where the gradients are.
        enabled: False makes every method do what one would do without a scale.
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
        self.enabled, self.growth_interval, self.floor = enabled, growth_interval, floor
        self.value = torch.tensor(scale if enabled else 1.0, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        """1 from when a gradient that is not finite was seen until the next look, else 0."""
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
        """Divide the gradients of an optimizer by the scale, once a step: before they are clipped, for example."""
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
        """Unscale if that was not done, and update unless a gradient is not finite.

        An optimizer that does not decide on the device makes the host wait for the decision.
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
            torch._amp_update_scale_(self.value, self.good_steps, self.skipped, GROWTH, BACKOFF, self.growth_interval)
            self.value.clamp_(min=self.floor)

    def state_dict(self) -> dict[str, Any]:
        """What `torch.amp.GradScaler` keeps in checkpoints; empty where nothing is scaled."""
        if not self.enabled:
            return {}
        return {
            "scale": float(self.value),
            "growth_factor": GROWTH,
            "backoff_factor": BACKOFF,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.good_steps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of this class or of a `GradScaler`; an empty one changes nothing."""
        if state and self.enabled:
            self.value.fill_(state["scale"])
            self.good_steps.fill_(state["_growth_tracker"])
            self.growth_interval = state.get("growth_interval", self.growth_interval)


def decides_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer reads on the device that a step is to be skipped: torch's `fused=True`, and Muon."""
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
    optimizer.grad_scale, optimizer.found_inf = None, skipped  # as torch's GradScaler tells it
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
