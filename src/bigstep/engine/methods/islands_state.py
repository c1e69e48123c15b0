"""What islands carry from step to step: what each holds and what all agreed on, for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bigstep.engine.methods.island import Island

if TYPE_CHECKING:
    from bigstep.engine.methods.islands import Islands

__all__ = ["Agreed", "IslandsState", "OwnBuffers", "OwnShare", "join_shares"]


class IslandsState:
    """All islands as one part of a state."""

    def __init__(self, method: Islands):
        self._method = method

    def state_dict(self) -> dict[str, Any]:
        """Collect what every island carries, on the first rank; every rank must call this."""
        method = self._method
        if method.mainland is not None:
            return {"mainland": {name: part.state_dict() for name, part in method.mainland.parts().items()}}
        shares = method.outer_ranks.to_first(OwnShare(method).state_dict())  # to one rank: these links may be slow
        return {} if shares is None else join_shares(shares)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there, whichever ranks host the islands now; one that is missing gets the agreed weights."""
        method = self._method
        if "mainland" in state:
            assert method.mainland is not None
            for name, part in method.mainland.parts().items():
                if name in state["mainland"]:
                    part.load_state_dict(state["mainland"][name])
            return
        if method.mainland is not None:
            method.part()
        rounds = method.rounds
        assert rounds is not None
        rounds.steps, rounds.present = state["steps"], [list(fragment) for fragment in state["present"]]
        rounds.met = tuple(state.get("met", rounds.met))
        method.ahead = {int(number): taken for number, taken in state.get("ahead", {}).items()}
        method.unheard = list(state.get("unheard", []))
        rounds.outer.load_state_dict(state["outer"])
        for island in method.islands:
            self._load(island, state["islands"].get(str(island.number), {}))
        rounds.travelling = {
            int(n): (each["mean"].to(method.ranks.device), each["at"]) for n, each in state["travelling"].items()
        }

    @torch.no_grad()
    def _load(self, island: Island, saved: Mapping[str, Any]) -> None:
        method = self._method
        assert method.rounds is not None
        outer = method.rounds.outer
        if "weights" in saved:
            for weight, value in zip(island.weights, saved["weights"], strict=True):
                weight.copy_(value)
            island.samples = list(saved["samples"])
            island.losses = {
                int(taken): torch.tensor(loss, dtype=torch.float64) for taken, loss in saved.get("losses", {}).items()
            }
        else:
            for number in range(len(outer.fragments)):
                outer.hand_out(number, island.weights)
        method.fill(island, saved)
        island.method.passes.renew()


class OwnShare(IslandsState):
    """The islands of this rank alone, and what all agreed on: what it can save without asking other islands."""

    def state_dict(self) -> dict[str, Any]:
        """Collect it; every rank of an island must call this."""
        method = self._method
        rounds = method.rounds
        assert rounds is not None
        islands = {}
        for island in method.islands:
            method.enter(island)
            carried = {name: part.state_dict() for name, part in island.method.parts().items() if name != "model"}
            losses = {str(taken): float(loss) for taken, loss in island.losses.items()}
            own = {"weights": island.weights, "samples": island.samples, "losses": losses}
            islands[str(island.number)] = {**own, **carried}
        travelling = {
            str(n): {"mean": m if isinstance(m, Tensor) else m.wait(), "at": at}
            for n, (m, at) in rounds.travelling.items()
        }
        return {
            "steps": rounds.steps,
            "islands": islands,
            "outer": rounds.outer.state_dict(),
            "travelling": travelling,
            "present": rounds.present,
            "met": list(rounds.met),
            "ahead": {str(number): taken for number, taken in method.ahead.items()},
            "unheard": method.unheard,
        }


def join_shares(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the shares of ranks, which agree on everything but their islands."""
    first = shares[0]
    return {
        **first,
        "islands": {name: state for share in shares for name, state in share["islands"].items()},
        "outer": {**first["outer"], "kept": {n: k for share in shares for n, k in share["outer"]["kept"].items()}},
    }


class Agreed:
    """The network as a whole, as it is evaluated: weights and buffers by name."""

    def __init__(self, method: Islands):
        self._method = method

    def state_dict(self) -> dict[str, Tensor]:
        """Return the mean of all islands; every rank must call this."""
        with self._method.evaluation() as model:
            return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the buffers; the islands load their weights themselves."""
        names = {name for name, _ in self._method.learner.model.named_parameters()}
        buffers = {name: value for name, value in state.items() if name not in names}
        self._method.learner.model.load_state_dict(buffers, strict=False)


class OwnBuffers(Agreed):
    """The buffers of this rank's model, for what it saves by itself."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return them by name, without any other rank."""
        return {name: value.detach().clone() for name, value in self._method.learner.model.named_buffers()}
