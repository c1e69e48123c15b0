"""RMSprop warm-up: start as RMSprop, end as momentum SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bigstep.errors import ConfigError, RunError
from bigstep.optim.multi_tensor import MultiTensorOptimizer
from bigstep.schedules import elu_blend
from bigstep.tables.optimizers import RMSpropWarmupSettings

__all__ = ["RMSpropWarmup", "changing", "rmsprop_warmup", "rmsprop_warmup_reference"]

SETTINGS = ("lr", "momentum", "rms_decay", "rms_lr", "eps", "weight_decay", "blend")
"""The settings of a parameter group; torch adds other names to a group."""


class RMSpropWarmup(MultiTensorOptimizer):
    """A blend of RMSprop and momentum SGD, which the caller shifts from the first to the second.

    ::

        a_SGD = blend,    a_RMS = (1 - blend) * rms_lr / lr
        m     <- rms_decay * m + (1 - rms_decay) * g^2
        delta <- momentum * delta - (a_SGD + a_RMS / (sqrt(m) + eps)) * g
        w     <- w + lr * delta

    Before each step, set the `blend` of every parameter group, as you set `lr`: to `elu_blend(epoch)` of
    `bigstep.schedules`. At blend = 1 a step is momentum SGD, at blend = 0 RMSprop with the rate `rms_lr`, whatever `lr`
    is. Below blend = 1 an `lr` of 0 is refused; if it is a tensor, whose value a step does not wait for, a_RMS is 0 and
    the weights stay. A new optimizer has blend = 1: if you forget to set it there is no warm-up, which shows at once at
    a large rate, whereas a forgotten 0 would only be slow.

    Args:
        params: Parameters or groups of them.
        lr: Rate of SGD (eta), greater than 0 at first; a float or a 0-dim tensor, which may change between steps.
        momentum: Factor of the old delta in the new one (mu1).
        rms_decay: Factor of the old average of squared gradients in the new one (mu2).
        rms_lr: Rate of the pure RMSprop phase (eta_RMS).
        eps: Added to the root of that average.
        weight_decay: L2 decay, added to the gradient first.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = RMSpropWarmup([weight], lr=1.0, momentum=0.0, rms_decay=0.0, rms_lr=0.01)
    >>> for blend in (0.0, 1.0):  # RMSprop evens out the two gradients, SGD does not
    ...     optimizer.param_groups[0]["blend"] = blend
    ...     weight.data.zero_()
    ...     weight.grad = torch.tensor([0.5, 100.0])
    ...     _ = optimizer.step()
    ...     print([round(value, 4) for value in weight.tolist()])
    tensor([0., 0.])
    [-0.01, -0.01]
    tensor([0., 0.])
    [-0.5, -100.0]

    Reference: Akiba, Suzuki, Fukuda, Extremely Large Minibatch SGD, 2017, section 3.1.

    Differs from the paper: the rule for a_RMS and rms_lr = 3e-4 come from public implementations. As in the paper, m
    starts at 0 without a correction, so the first steps of RMSprop are up to 1 / sqrt(1 - rms_decay) times rms_lr.
    """

    changing = ("lr", "blend")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        rms_decay: float = 0.99,
        rms_lr: float = 3e-4,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """See the class."""
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "rms_decay": rms_decay,
            "rms_lr": rms_lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "blend": 1.0,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its rate must begin above 0, but a schedule may end at 0, and a saved state may hold that."""
        begins = {**self.defaults, **param_group}
        self._expect(begins, "lr", isinstance(begins["lr"], Tensor) or begins["lr"] != 0, "greater than 0")
        super().add_param_group(param_group)

    def _update(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        rmsprop_warmup(params, grads, *self._lists(params), **{name: group[name] for name in SETTINGS})

    def _buffers(self, group: Mapping[str, Any], param: Tensor) -> list[Tensor]:
        return self._zeros(param, "momentum_buffer", "square_average")


def changing(settings: RMSpropWarmupSettings, epoch: float, lr: float) -> dict[str, Any]:
    """Return the setting that changes from step to step besides the rate: the weight of SGD.

    >>> changing(RMSpropWarmupSettings(blend_center=10.0), epoch=10.0, lr=0.1)
    {'blend': 0.5}
    """
    blend = elu_blend(epoch, settings.blend_center, settings.blend_period)
    if lr == 0 and blend < 1:
        until = settings.blend_center + settings.blend_period / 2
        raise RunError(
            f"The learning rate is 0 at epoch {epoch:.2f}, and optimizer.name=rmsprop_warmup divides by it until "
            f"epoch {until:g}: keep lr.schedule above 0 until then."
        )
    return {"blend": blend}


def rmsprop_warmup(
    params: list[Tensor],
    grads: list[Tensor],
    deltas: list[Tensor],
    squares: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    rms_decay: float,
    rms_lr: float,
    eps: float,
    weight_decay: float,
    blend: float | Tensor,
) -> None:
    """Update `params`, `deltas` and `squares` in place, all tensors together; they share one device and dtype.

    Equal to `rmsprop_warmup_reference`, which is the specification; the arguments are those of `RMSpropWarmup`.

    >>> weight, delta, square = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    >>> settings = dict(momentum=0.9, rms_decay=0.0, eps=0.0, weight_decay=0.0, blend=0.5)
    >>> rmsprop_warmup([weight], [torch.tensor([4.0])], [delta], [square], lr=0.5, rms_lr=0.25, **settings)
    >>> weight  # half a step of SGD, 0.5 * 4, and half a step of RMSprop, 0.25
    tensor([-1.1250])
    """
    decayed = torch._foreach_add(grads, params, alpha=weight_decay)  # new tensors: gradients must not change
    torch._foreach_mul_(squares, rms_decay)
    torch._foreach_addcmul_(squares, decayed, decayed, value=1 - rms_decay)
    steps = torch._foreach_mul(decayed, blend)
    if isinstance(blend, Tensor) or blend != 1.0:  # at 1 RMSprop has no weight, and lr may be 0 by then
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, eps)
        torch._foreach_div_(decayed, roots)
        torch._foreach_mul_(decayed, _rms_share(blend, rms_lr, lr))
        torch._foreach_add_(steps, decayed)
    torch._foreach_mul_(deltas, momentum)
    torch._foreach_sub_(deltas, steps)
    torch._foreach_add_(params, torch._foreach_mul(deltas, lr))


def _rms_share(blend: float | Tensor, rms_lr: float, lr: float | Tensor) -> float | Tensor:
    """a_RMS = (1 - blend) * rms_lr / lr; 0 at blend = 1, when lr may have decayed to 0, and for a tensor lr of 0."""
    if not isinstance(lr, Tensor) and lr == 0 and not isinstance(blend, Tensor):
        raise ConfigError(f"RMSpropWarmup divides by lr, which is 0 at blend={blend:g}; keep it above 0 if blend < 1.")
    share, product = (1 - blend) * rms_lr / lr, (1 - blend) * lr
    return torch.where(product == 0, 0.0, share) if isinstance(product, Tensor) else share


def rmsprop_warmup_reference(
    params: list[Tensor],
    grads: list[Tensor],
    deltas: list[Tensor],
    squares: list[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    rms_decay: float,
    rms_lr: float,
    eps: float,
    weight_decay: float,
    blend: float | Tensor,
) -> None:
    """The specification of `rmsprop_warmup`: one tensor after another, following the equations.

    >>> weight, delta, square = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    >>> settings = dict(momentum=0.9, rms_decay=0.0, eps=0.0, weight_decay=0.0, blend=0.5)
    >>> rmsprop_warmup_reference([weight], [torch.tensor([4.0])], [delta], [square], lr=0.5, rms_lr=0.25, **settings)
    >>> weight
    tensor([-1.1250])
    """
    for weight, grad, delta, square in zip(params, grads, deltas, squares, strict=True):
        decayed = grad + weight_decay * weight
        square.mul_(rms_decay).add_((1 - rms_decay) * decayed**2)
        rms = (1 - blend) * rms_lr / lr
        delta.mul_(momentum).sub_((blend + rms / (square.sqrt() + eps)) * decayed)
        weight.add_(lr * delta)
