"""What a lossy codec kept back, by parameter: it survives new buckets, a checkpoint and another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Residuals", "mean_over_ranks", "owed"]


class Residuals:
    """One flat residual for each parameter, held as one tensor for each bucket.

    DDP groups parameters into other buckets after its first step. `flat` notices a bucket it has not seen and moves
    what belongs to its parameters over from the old ones.
    """

    def __init__(self) -> None:
        self._of: dict[str, Tensor] = {}
        self._flats: dict[tuple[str, ...], Tensor] = {}

    def flat(self, names: Sequence[str], sizes: Sequence[int], like: Tensor) -> Tensor:
        """The residuals of these parameters one behind the other, to be changed in place; zeros where there were none.

        Args:
            names: Of the parameters of a bucket.
            sizes: Values of each.
            like: Gives the type and the device.
        """
        key = tuple(names)
        if key not in self._flats:
            pieces = [
                self._of[name].to(like) if name in self._of else like.new_zeros(size)
                for name, size in zip(names, sizes, strict=True)
            ]
            joined = torch.cat(pieces) if pieces else like.new_zeros(0)
            self._flats = {old: flat for old, flat in self._flats.items() if not set(old) & set(key)}
            self._flats[key] = joined
            self._of.update(zip(names, joined.split_with_sizes(list(sizes)), strict=True))
        return self._flats[key]

    def scale(self, factor: float) -> None:
        """Multiply all residuals."""
        for residual in self._of.values():
            residual.mul_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of each residual, on the CPU."""
        return {name: residual.detach().to("cpu", copy=True) for name, residual in sorted(self._of.items())}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Carry on from these."""
        self._flats.clear()
        self._of = {name: residual.clone() for name, residual in state.items()}


def mean_over_ranks(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What each rank carries on with when the number of ranks has changed: the mean of the old residuals.

    An exchange returns the mean of what its N ranks sent, so a residual e_r of one rank is worth e_r / N of the model's
    gradient. If each of M new ranks starts with m = (sum of e_r) / N, what is owed stays the same::

        (1 / M) * sum over M ranks of m  =  (1 / N) * sum over N ranks of e_r

    >>> old = [{"w": torch.tensor([3.0])}, {"w": torch.tensor([-1.0])}, {"w": torch.tensor([4.0])}]
    >>> mean_over_ranks(old)
    {'w': tensor([2.])}
    """
    names = sorted({name for state in states for name in state})
    return {
        name: torch.stack([state[name].double() for state in states if name in state]).sum(0).div(len(states))
        .to(next(state[name] for state in states if name in state).dtype)
        for name in names
    }  # fmt: skip


def owed(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the model has not yet got of the mean gradients, out of `Exchange.gather_state`: flat, in float64, by name.

    The mean of the ranks' residuals, the owners' residuals, and with double buffering the gradient still on its way.
    Added once to a gradient, it settles the account: so a run goes on with one rank, which exchanges nothing.

    >>> ranks = {"0": {"w": torch.tensor([3.0])}, "1": {"w": torch.tensor([-1.0])}}
    >>> owed({"carried": {"sent_by_rank": ranks, "owned_by_all": {"w": torch.tensor([0.5])}}, "late": {}})
    {'w': tensor([1.5000], dtype=torch.float64)}
    """
    carried = state["carried"]
    by_rank = carried.get("sent_by_rank") or carried.get("error_by_rank") or {}
    total: dict[str, Tensor] = {}
    for residuals in by_rank.values():
        for name, residual in residuals.items():
            total[name] = total.get(name, 0) + residual.double().flatten() / len(by_rank)
    for whole in (carried.get("owned_by_all", {}), state["late"]):  # counted once, not once a rank
        for name, residual in whole.items():
            total[name] = total.get(name, 0) + residual.double().flatten()
    return total
