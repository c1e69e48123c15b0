"""Shampoo and SOAP in the place of Muon, for a first look: do they lose still less at a huge batch?

Both keep averages of what rows and columns of a matrix have in common, L of G G' and R of G' G. With n the momentum::

    Shampoo    O = L^(-1/4) n R^(-1/4)
    SOAP       O = Q_L (Q_L' n Q_R / sqrt(V)) Q_R',    V an average of (Q_L' G Q_R)^2, Q the eigenvectors of L and R

Without averages, L = G G' and R = G' G, Shampoo's O is what Muon orthogonalises to. So that nothing but the direction
differs, `graft` brings O to the length of Muon's; the rest of the network is updated as under Muon. Eigenvectors are
computed anew in every step, which is the most that these rules can gain. `python benchmarks/huge/second_order.py` times
one update of each; `embedded.py second_order` trains with them.

References: Gupta et al., Shampoo, 2018; Anil et al., Scalable Second Order Optimization for Deep Learning, 2020
(grafting); Vyas et al., SOAP, 2024.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bigstep.models import build_model
from bigstep.optim import Muon, parameter_groups
from bigstep.optim.multi_tensor import descend

AVERAGED = 0.95
"""What an average keeps in a step: SOAP's."""
DAMPING = 1e-6
"""Of the largest eigenvalue, added to all."""


class SecondOrder(Muon):
    """Muon with another direction for its matrices."""

    def __init__(self, params: Any, lr: float | Tensor, *, graft: bool = True, **settings: Any) -> None:
        super().__init__(params, lr, **settings)
        self._graft = graft

    def _update_matrices(self, group: Mapping[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        for param, grad, momentum in zip(params, grads, self._momentum(group, params, grads), strict=True):
            state = self.state[param]
            g, n = grad.flatten(1).double(), momentum.flatten(1).double()
            rows, cols = g.shape
            if "left" not in state:
                state |= {"left": g.new_zeros(rows, rows), "right": g.new_zeros(cols, cols), "taken": 0}
            state["taken"] += 1
            state["left"].lerp_(g @ g.T, 1 - AVERAGED)
            state["right"].lerp_(g.T @ g, 1 - AVERAGED)
            direction = self.direction(state, g, n, eps=group["eps"])
            if self._graft:
                length = (min(rows, cols) * max(1, rows / cols)) ** 0.5
                direction *= length / direction.norm().clamp(min=1e-30)
            if group["renormalise"]:
                param.mul_(rows**0.5 / param.norm().clamp(min=1e-30))
            descend([param], [direction.to(param.dtype).view_as(param)], self._rate(group["lr"], param))

    def direction(self, state: dict[str, Any], g: Tensor, n: Tensor, *, eps: float) -> Tensor:
        """Return O."""
        raise NotImplementedError


class Shampoo(SecondOrder):
    """L^(-1/4) n R^(-1/4)."""

    def direction(self, state: dict[str, Any], g: Tensor, n: Tensor, *, eps: float) -> Tensor:
        left, right = (_root(state[side]) for side in ("left", "right"))
        return left @ n @ right


class Soap(SecondOrder):
    """Adam in the eigenbasis of Shampoo."""

    def direction(self, state: dict[str, Any], g: Tensor, n: Tensor, *, eps: float) -> Tensor:
        left, right = (_basis(state, side) for side in ("left", "right"))
        squares = (left.T @ g @ right).square()
        state["squares"] = squares * (1 - AVERAGED) + AVERAGED * state.get("squares", torch.zeros_like(squares))
        seen = state["squares"] / (1 - AVERAGED ** state["taken"])
        return left @ ((left.T @ n @ right) / (seen.sqrt() + eps)) @ right.T


def _root(average: Tensor) -> Tensor:
    """The inverse fourth root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(average)
    damped = (values.clamp(min=0) + DAMPING * values[-1]).clamp(min=1e-30)  # a layer behind a zero has no gradient yet
    return (vectors * damped.pow(-0.25)) @ vectors.T


def _basis(state: dict[str, Any], side: str) -> Tensor:
    """Eigenvectors of an average, in an order that lasts: a step of the power method from those of the step before."""
    name = f"{side} basis"
    if name in state:
        state[name] = torch.linalg.qr(state[side] @ state[name])[0]
    else:
        state[name] = torch.linalg.eigh(state[side])[1].flip(1)
    return state[name]


def main(rounds: int = 15) -> None:
    """Time one update of the embedded images' network on one thread, the three rules in turns."""
    torch.set_num_threads(1)
    rules: dict[str, Muon] = {}
    for rule in (Muon, Shampoo, Soap):
        torch.manual_seed(0)
        network = build_model("small", classes=10, channels=1, image_size=28)
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter)
        settings = {"momentum": 0.8, "renormalise": True, "rest": "sgd"}
        rules[rule.__name__] = rule(parameter_groups(network, weight_decay=0.0), lr=0.1, **settings)
    times: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(rounds + 1):
        for name, optimizer in rules.items():
            begin = time.perf_counter()
            optimizer.step()
            times[name].append(1e3 * (time.perf_counter() - begin))
    for name, (_, *each) in times.items():  # the first makes state
        print(f"{name}: {statistics.median(each):.1f} ms ({min(each):.1f} to {max(each):.1f}, n = {rounds})")


if __name__ == "__main__":
    main()
