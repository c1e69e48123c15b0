"""Muon: momentum whose matrices are made orthogonal, so that a layer learns all directions equally fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from bigstep.errors import ConfigError
from bigstep.gpu.tensor_lists import laid_out_like
from bigstep.optim.multi_tensor import MultiTensorOptimizer, descend
from bigstep.optim.orthogonal import EPS, A, B, C, orthogonalise_all

__all__ = ["Muon", "muon_reference"]

KINDS = ("matrix", "rest")
RULES = ("sgd", "adamw")


class Muon(MultiTensorOptimizer):
    """Momentum orthogonalised by Newton-Schulz, for every matrix and convolution; SGD or AdamW for the rest.

    ::

        v <- momentum * v + g,    n = g + momentum * v                     nesterov=False: n = v
        renormalise: w <- w * sqrt(out) / |w|
        w <- (1 - lr * weight_decay) * w - lr * sqrt(max(1, out / in)) * O

    O is n, seen as `out` rows of `in` numbers (a filter bank as out x everything else), with its singular values
    brought near 1 by `iterations` rounds of matrix products (`orthogonalise`). On a CUDA device these products are in
    bf16 for float32 weights, otherwise in the precision of the weights. Matrices of equal shape are multiplied
    together. The rest::

        sgd:      the same v and n;    w <- (1 - r * weight_decay) * w - r * n                   r = rest_lr * lr
        adamw:    Adam's direction d;  w <- (1 - r * weight_decay) * w - r * d

    A parameter with two or more dimensions is a matrix and any other is of the rest, unless its group has a `kind`:
    "matrix" or "rest", or a list with one of them for each parameter. `parameter_groups` gives a list that puts
    embeddings and the head of the network into the rest, as it should be. All values stay on the device, so a step may
    be part of a whole-step graph.

    Args:
        params: Parameters or groups of them.
        lr: Length of a matrix's step, about the largest change of its output for an input of length 1; a float or a
            0-dim tensor, which may change in `param_groups` between steps.
        momentum: Factor of the old v in the new one.
        nesterov: Use Nesterov momentum.
        iterations: Newton-Schulz iterations.
        renormalise: Bring each matrix to the norm sqrt(out) before its update, for networks in which norm layers make
            the length of the matrix irrelevant.
        weight_decay: Decoupled weight decay.
        rest: "adamw" or "sgd".
        rest_lr: Rate of the rest, as a multiple of lr.
        betas: AdamW's betas.
        eps: AdamW's eps.
        group: Ranks that take the same steps: each orthogonalises its share and receives the others'. Which rank takes
            which matrix depends on the shapes alone, and the result does not depend on it, except for rounding.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
    >>> optimizer = Muon([weight], lr=0.1, momentum=0.0, nesterov=False, iterations=10)
    >>> weight.grad = torch.tensor([[100.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    >>> _ = optimizer.step()  # both directions alike, though one gradient is 200 times the other
    >>> bool(0.6 < weight[0, 0] / weight[1, 1] < 1.7)
    True

    Reference: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; airbench (Jordan, 2024) for
    convolutions and renormalised weights.

    Differs from them: v is not scaled by 1 - momentum, which does not change O; airbench has no factor
    sqrt(max(1, out / in)); decay is decoupled for the rest too.
    """

    _step_supports_amp_scaling = True  # torch's name: `found_inf` and `grad_scale` are read on the device
    process_group: dist.ProcessGroup | None = None
    """Ranks that share the work of a step; it may change between steps, in the same way on all of them."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        iterations: int = 5,
        renormalise: bool = False,
        weight_decay: float = 0.0,
        rest: str = "adamw",
        rest_lr: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """See the class."""
        self.process_group = group
        settings = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "iterations": iterations,
            "renormalise": renormalise,
            "weight_decay": weight_decay,
            "rest": rest,
            "rest_lr": rest_lr,
            "betas": betas,
            "eps": eps,
            "kind": None,
        }
        super().__init__(params, settings)

    def _require(self, group: Mapping[str, Any]) -> None:
        super()._require(group)
        iterations = group["iterations"]
        fits = isinstance(iterations, Integral) and int(iterations) >= 1
        self._expect(group, "iterations", fits, "a whole number of at least 1")
        self._expect(group, "rest", group["rest"] in RULES, " or ".join(map(repr, RULES)))
        _require_kinds(group)

    def _update(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        kind = dict(zip(group["params"], _kinds(group), strict=True))
        for name, update in (("matrix", self._update_matrices), ("rest", self._update_rest)):
            pairs = [pair for pair in zip(params, grads, strict=True) if kind[pair[0]] == name and pair[0].numel()]
            if pairs:
                update(group, [p for p, _ in pairs], [g for _, g in pairs])

    def _update_matrices(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        directions = self._momentum(group, params, grads)
        matrices = [_as_matrix(direction, param) for direction, param in zip(directions, params, strict=True)]
        orthogonal = orthogonalise_all(matrices, group["iterations"], self.process_group)
        steps = [torch.empty_like(param) for param in params]
        torch._foreach_copy_(steps, [_like(o, param) for o, param in zip(orthogonal, params, strict=True)])
        torch._foreach_mul_(steps, [max(1.0, m.shape[0] / m.shape[1]) ** 0.5 for m in matrices])
        taken = self._taken()
        if group["renormalise"]:
            lengths = torch.stack(
                torch._foreach_div(torch._foreach_norm(params), [m.shape[0] ** 0.5 for m in matrices])
            )
            torch._foreach_mul_(params, torch.where((lengths > 0) & (taken > 0), 1 / lengths, 1.0).unbind())
        _move(params, steps, self._rate(group["lr"], params[0]), group["weight_decay"])

    def _update_rest(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        lr, decay, taken = group["rest_lr"] * group["lr"], group["weight_decay"], self._taken()
        if group["rest"] == "sgd":
            _move(params, self._momentum(group, params, grads), self._rate(lr, params[0]), decay)
            return
        averages, squares, steps = (list(each) for each in zip(*map(self._moments, params), strict=True))
        torch._foreach_add_(steps, [taken] * len(steps) if isinstance(taken, Tensor) else taken)
        dense = laid_out_like(averages, params)  # the kernel ignores strides and assumes dense memory
        torch._fused_adamw_(
            dense,
            laid_out_like(averages, grads),
            averages,
            squares,
            [],
            steps,
            lr=lr.float() if isinstance(lr, Tensor) and lr.is_cuda else lr,  # the kernel reads no other type there
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=decay,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
        for param, held in zip(params, dense, strict=True):
            if held is not param:
                param.copy_(held)

    def _momentum(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Update v and return n; in a skipped step v stays unchanged and n is 0.

        Torch's fused SGD computes both, on weights of zero, whether gradients are scaled or not: a scale that is a
        power of two then changes no bit.
        """
        velocities = [velocity for param in params for velocity in self._zeros(param, "momentum_buffer")]
        directions = [torch.empty_like(velocity) for velocity in velocities]
        torch._foreach_zero_(directions)
        torch._fused_sgd_(
            directions,
            laid_out_like(velocities, grads),
            velocities if group["momentum"] else [],
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=-1.0,  # 0 + n
            dampening=0.0,
            nesterov=group["nesterov"] and group["momentum"] > 0,
            maximize=False,
            is_first_step=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )
        return directions

    def _rate(self, rate: float | Tensor, like: Tensor) -> Tensor:
        """The rate, or 0 for a skipped step; always a tensor, so that rounding does not depend on how it was given."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        given = rate.to(dtype) if isinstance(rate, Tensor) else torch.full((), rate, dtype=dtype, device=like.device)
        return given * self._taken()

    def _taken(self) -> Tensor | float:
        """1, or 0 for a skipped step; a tensor where only the device knows which."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        return 1.0 if found_inf is None else 1.0 - found_inf

    def _moments(self, param: Tensor) -> list[Tensor]:
        return [*self._zeros(param, "exp_avg", "exp_avg_sq"), self._count(param)]

    def _buffers(self, group: Mapping[str, Any], param: Tensor) -> list[Tensor]:
        kind = dict(zip(group["params"], _kinds(group), strict=True))[param]
        is_adam = kind == "rest" and group["rest"] == "adamw"
        return self._moments(param) if is_adam else self._zeros(param, "momentum_buffer")


def _require_kinds(group: Mapping[str, Any]) -> None:
    """Refuse kinds that do not fit the parameters of a group."""
    given, params = group["kind"], group["params"]
    kinds = _kinds(group) if given is None or isinstance(given, Sequence) else []
    if len(kinds) != len(params) or any(kind not in KINDS for kind in kinds):
        raise ConfigError(
            f"Muon was given kind={given!r:.200} for {len(params)} parameters; allowed are "
            f"{' and '.join(map(repr, KINDS))}, one for the group or one for each parameter."
        )
    for param, kind in zip(params, kinds, strict=True):
        if kind == "matrix" and param.ndim < 2:
            raise ConfigError(f"Muon was given a matrix of shape {tuple(param.shape)}; set kind='rest' for its group.")


def _kinds(group: Mapping[str, Any]) -> list[str]:
    """The kind of each parameter of a group."""
    kind, params = group["kind"], group["params"]
    if kind is None:
        return ["matrix" if param.ndim >= 2 else "rest" for param in params]
    return [kind] * len(params) if isinstance(kind, str) else list(kind)


def _memory_order(param: Tensor) -> list[int]:
    """The dimensions after the first in memory order: columns may be in any order, and this one needs no copy."""
    strides = param.stride()
    return sorted(range(1, param.ndim), key=lambda dimension: -strides[dimension])


def _as_matrix(tensor: Tensor, param: Tensor) -> Tensor:
    """View a tensor with the shape of a parameter as out x everything else."""
    return tensor.permute(0, *_memory_order(param)).reshape(len(param), -1)


def _like(matrix: Tensor, param: Tensor) -> Tensor:
    """The inverse of `_as_matrix`."""
    order = _memory_order(param)
    back = sorted(range(param.ndim), key=[0, *order].__getitem__)
    return matrix.reshape(len(param), *(param.shape[dimension] for dimension in order)).permute(back)


def _move(params: list[Tensor], directions: list[Tensor], lr: Tensor, weight_decay: float) -> None:
    """Update w <- (1 - lr * weight_decay) * w - lr * direction in place."""
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    descend(params, directions, lr)


@torch.no_grad()
def muon_reference(
    weight: Tensor,
    grad: Tensor,
    velocity: Tensor,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    iterations: int,
    renormalise: bool,
    weight_decay: float,
) -> None:
    """The specification of Muon for one matrix or filter bank, following the equations.

    >>> w, v = torch.zeros(2, 2), torch.zeros(2, 2)
    >>> settings = dict(momentum=0.9, nesterov=False, iterations=12, renormalise=False, weight_decay=0.0)
    >>> muon_reference(w, torch.tensor([[3.0, 0.0], [0.0, -0.1]]), v, lr=1.0, **settings)
    >>> bool(-1.3 < w[0, 0] < -0.6), bool(0.6 < w[1, 1] < 1.3)
    (True, True)
    """
    velocity.mul_(momentum).add_(grad)
    n = (grad + momentum * velocity if nesterov else velocity).flatten(1)
    rows, cols = n.shape
    x = (n.T if rows > cols else n) / (n.norm() + EPS)
    for _ in range(iterations):
        a = x @ x.T
        x = A * x + (B * a + C * a @ a) @ x
    o = (x.T if rows > cols else x).reshape(weight.shape)
    if renormalise and weight.norm() > 0:
        weight.mul_(rows**0.5 / weight.norm())
    weight.copy_((1 - lr * weight_decay) * weight - lr * max(1, rows / cols) ** 0.5 * o)
