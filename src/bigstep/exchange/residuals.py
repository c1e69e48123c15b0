"""What an exchange carries from step to step; only this module keeps it (by parameter), saves, merges and rescales it.

There are three kinds::

    sent     what this rank has not sent yet; counts 1/N in the mean gradient, like all that a rank sends
    owned    what the owner of a block has not sent yet; counts fully, whichever rank holds it
    shared   the same on all ranks and not a gradient (the factors of PowerSGD)

Everything is kept by parameter name and element, so it survives new buckets, a checkpoint and another number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Owners", "Pieces", "Residuals", "mean_over_ranks", "sum_owed"]


class Pieces:
    """One flat tensor for each parameter, held as one tensor for each bucket.

    DDP groups parameters into other buckets after its first step. A new bucket takes over what the old ones hold for
    its parameters.
    """

    def __init__(self) -> None:
        self._of: dict[str, Tensor] = {}
        self._flats: dict[tuple[str, ...], Tensor] = {}

    def knows(self, names: Sequence[str]) -> bool:
        """Whether there is something for each of these parameters."""
        return all(name in self._of for name in names)

    def flat(self, names: Sequence[str], sizes: Sequence[int], like: Tensor) -> Tensor:
        """The pieces of these parameters, concatenated, to be changed in place; zeros where there were none.

        Args:
            names: Of the parameters of a bucket.
            sizes: Number of values of each.
            like: Gives the type and the device.
        """
        if tuple(names) not in self._flats:
            pieces = [
                self._of[name].to(like) if name in self._of else like.new_zeros(size)
                for name, size in zip(names, sizes, strict=True)
            ]
            self.put(names, sizes, torch.cat(pieces) if pieces else like.new_zeros(0))
        return self._flats[tuple(names)]

    def put(self, names: Sequence[str], sizes: Sequence[int], flat: Tensor) -> None:
        """Hold this tensor for these parameters from now on."""
        key = tuple(names)
        self._flats = {old: kept for old, kept in self._flats.items() if not set(old) & set(key)}
        self._flats[key] = flat
        self._of.update(zip(names, flat.split_with_sizes(list(sizes)), strict=True))

    def scale(self, factor: float) -> None:
        """Multiply everything."""
        for piece in self._of.values():
            piece.mul_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of each piece, on the CPU."""
        return {name: piece.detach().to("cpu", copy=True) for name, piece in sorted(self._of.items())}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Carry on from these."""
        self._flats.clear()
        self._of = {name: piece.clone() for name, piece in state.items()}


class Owners:
    """Who owns which block: the i-th block of the whole model belongs to rank i mod N.

    So ownership does not depend on how DDP groups parameters into buckets, and every bucket is spread over all ranks.

    Args:
        lengths: Of the blocks of every parameter by name, in the same order on all ranks.
    """

    def __init__(self, lengths: Mapping[str, Sequence[int]]) -> None:
        self._lengths = dict(lengths)
        self._first: dict[str, int] = {}
        count = 0
        for name, blocks in self._lengths.items():
            self._first[name] = count
            count += len(blocks)

    def owners(self, name: str, ranks: int) -> list[int]:
        """The owner of each block of a parameter, given the number of ranks."""
        return [(self._first[name] + i) % ranks for i in range(len(self._lengths[name]))]

    def take(self, name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """The blocks of a parameter that `rank` owns, concatenated."""
        blocks = whole.split_with_sizes(list(self._lengths[name]))
        mine = [block for block, owner in zip(blocks, self.owners(name, ranks), strict=True) if owner == rank]
        return torch.cat(mine) if mine else whole.new_zeros(0)

    def join(self, name: str, parts: Sequence[Tensor | None]) -> Tensor:
        """A whole parameter from the parts of all ranks; zeros for a rank without one."""
        owners = self.owners(name, len(parts))
        rest = [iter(self._split(name, part, rank, len(parts))) for rank, part in enumerate(parts)]
        blocks = [next(rest[owner]) for owner in owners]
        return torch.cat(blocks) if blocks else torch.zeros(0)  # a parameter without values has none

    def _split(self, name: str, part: Tensor | None, rank: int, ranks: int) -> Sequence[Tensor]:
        owners = self.owners(name, ranks)
        mine = [length for length, owner in zip(self._lengths[name], owners, strict=True) if owner == rank]
        return (torch.zeros(sum(mine)) if part is None else part).split_with_sizes(mine) if mine else []


class Residuals:
    """All that one rank's exchange carries.

    Args:
        rank: Of this process.
        ranks: How many there are.
        owners: Of the blocks, if blocks have owners.
        shared: Names of what is the same on all ranks.
    """

    def __init__(self, rank: int, ranks: int, owners: Owners | None = None, shared: Sequence[str] = ()) -> None:
        self._rank, self._ranks = rank, ranks
        self._owners = owners or Owners({})
        self.sent, self.owned = Pieces(), Pieces()
        self.shared = {kind: Pieces() for kind in shared}

    def scale(self, factor: float) -> None:
        """Multiply the residuals that are gradients, for example when the loss scale changes."""
        self.sent.scale(factor)
        self.owned.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """What this rank carries; of the owners' residuals, those of its own blocks, concatenated."""
        shared = {kind: pieces.state_dict() for kind, pieces in self.shared.items()}
        return {"sent": self.sent.state_dict(), "owned": self.owned.state_dict(), "shared": shared}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks into one that `load` takes on any number of ranks."""
        owned = {
            name: self._owners.join(name, [state["owned"].get(name) for state in states])
            for name in sorted({name for state in states for name in state["owned"]})
        }
        sent = {str(rank): state["sent"] for rank, state in enumerate(states)}
        return {"sent_by_rank": sent, "owned_by_all": owned, "shared": states[0]["shared"]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Carry on from this rank's `state_dict`, or from a merged one.

        From a merged one each rank takes its own residual if the number of ranks is the same, else the mean of all
        (`mean_over_ranks`). The owners' residuals count fully in the mean gradient, whichever rank holds them: each
        element goes to its new owner, unchanged.
        """
        state = _translate(state)
        if "sent" in state:
            sent, owned = state["sent"], state["owned"]
        else:
            by_rank = state["sent_by_rank"]
            same = len(by_rank) == self._ranks
            sent = by_rank[str(self._rank)] if same else mean_over_ranks(list(by_rank.values()))
            owned = {
                name: self._owners.take(name, whole, self._rank, self._ranks)
                for name, whole in state["owned_by_all"].items()
            }
        self.sent.load(sent)
        self.owned.load(owned)
        for kind, pieces in self.shared.items():
            pieces.load(state["shared"].get(kind, {}))


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


def sum_owed(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Add up, from `Exchange.gather_state`, what the model has not yet received of the mean gradients.

    That is the mean of the ranks' residuals, the owners' residuals, and with double buffering the gradient still under
    way. Added once to a gradient it settles the account: this is how a run goes on with one rank, which exchanges
    nothing.

    Returns:
        Flat tensors in float64, by parameter name.

    >>> ranks = {"0": {"w": torch.tensor([3.0])}, "1": {"w": torch.tensor([-1.0])}}
    >>> sum_owed({"carried": {"sent_by_rank": ranks, "owned_by_all": {"w": torch.tensor([0.5])}}, "late": {}})
    {'w': tensor([1.5000], dtype=torch.float64)}
    """
    carried = _translate(state["carried"])
    by_rank = carried.get("sent_by_rank", {})
    total: dict[str, Tensor] = {}
    for residuals in by_rank.values():
        for name, residual in residuals.items():
            total[name] = total.get(name, 0) + residual.double().flatten() / len(by_rank)
    for whole in (carried.get("owned_by_all", {}), state["late"]):  # counted once, not once per rank
        for name, residual in whole.items():
            total[name] = total.get(name, 0) + residual.double().flatten()
    return total


def _translate(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate a state of version 0.1, where a dense exchange had no kinds and PowerSGD had keys of its own."""
    shared = state.get("shared") or {kind: state[kind] for kind in ("p", "q") if kind in state}
    by_rank = state.get("sent_by_rank", state.get("error_by_rank"))
    if by_rank is not None:
        return {"sent_by_rank": by_rank, "owned_by_all": state.get("owned_by_all", {}), "shared": shared}
    return {"sent": state.get("sent", state.get("error", {})), "owned": state.get("owned", {}), "shared": shared}
