"""PowerSGD through torch's own hook, with its state kept by parameter instead of by bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from bigstep.exchange.codecs import Bucket
from bigstep.exchange.error_feedback import mean_over_ranks
from bigstep.exchange.line import Steps
from bigstep.exchange.world import World
from bigstep.tables.codecs import encoded_bytes
from bigstep.tables.collectives import collective_traffic

__all__ = ["PowerSGD"]

# torch's state has one dictionary for each of these, from bucket to flat tensor
_KEPT = {"error": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}


class PowerSGD:
    """Low-rank approximation of each gradient, M = P Q^T, with error feedback and warm start.

    One bucket at a time: torch's hook starts its second and third all-reduce in callbacks, whose order may differ from
    rank to rank while several buckets are on their way.

    Args:
        world: The ranks.
        rank: Of the approximation.
        start_step: The first compressed step; torch allows 2 at the earliest, after DDP's last change of buckets.
        error_feedback: Carry what the approximation misses into the next step.

    Reference:
        Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
        2019, algorithms 1 and 2.
    """

    def __init__(self, world: World, rank: int, start_step: int, error_feedback: bool) -> None:
        self._world = world
        self._rank = rank
        self._start = max(2, start_step)
        self._state = PowerSGDState(
            process_group=world.new_group(world.everyone()),
            matrix_approximation_rank=rank,
            start_powerSGD_iter=self._start,
            use_error_feedback=error_feedback,
        )
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._sizes: dict[tuple[str, ...], dict[str, dict[str, int]]] = {}
        self.bytes_sent = 0.0

    def start(self, bucket: Bucket) -> Steps:
        """One step, in which torch's hook runs from beginning to end."""
        self._state.iter = bucket.step  # torch counts last buckets; the exchange knows its step also after a resume
        self._sizes[bucket.names] = self._piece_sizes(bucket)
        if bucket.step >= self._start:
            self._fill(bucket)
        codec = "none" if bucket.step < self._start else "powersgd"
        nbytes = encoded_bytes(codec, bucket.shapes, rank=self._rank) * bucket.flat.element_size() / 4
        self.bytes_sent += collective_traffic("ring", nbytes, self._world.size).bytes_sent
        powerSGD_hook(self._state, _HookBucket(bucket)).wait()  # type: ignore[arg-type]  # it has the same methods
        yield []

    def scale(self, factor: float) -> None:
        """Multiply the residuals."""
        for error in self._state.error_dict.values():
            error.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """Error, P and Q of each parameter."""
        state: dict[str, Any] = {kind: dict(self._loaded.get(kind, {})) for kind in _KEPT}
        for kind, slot in _KEPT.items():
            for names, flat in self._slot(slot).items():
                sizes = self._sizes[names][kind]
                pieces = flat.detach().to("cpu", copy=True).split_with_sizes(list(sizes.values()))
                state[kind].update(zip(sizes, pieces, strict=True))
        return state

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """All ranks' errors; P and Q are the same everywhere."""
        by_rank = {str(rank): state["error"] for rank, state in enumerate(states)}
        return {"error_by_rank": by_rank, "p": states[0]["p"], "q": states[0]["q"]}

    def load(self, state: dict[str, Any]) -> None:
        """Each rank takes its own error if their number is the same, else the mean of all (`mean_over_ranks`)."""
        by_rank = state.get("error_by_rank")
        if by_rank is None:
            error = state["error"]
        elif len(by_rank) == self._world.size:
            error = by_rank[str(self._world.rank)]
        else:
            error = mean_over_ranks(list(by_rank.values()))
        self._forget()
        self._loaded = {"error": dict(error), "p": dict(state["p"]), "q": dict(state["q"])}

    def _fill(self, bucket: Bucket) -> None:
        """Give torch's state what is known of the parameters of a bucket that it has not seen."""
        seen = self._slot("p_memory_dict")
        if bucket.names in seen:
            return
        self._loaded = self.state_dict()
        for kind, slot in _KEPT.items():
            known, sizes = self._loaded[kind], self._sizes[bucket.names][kind]
            if sizes and all(name in known for name in sizes):
                self._slot(slot)[bucket.names] = torch.cat([known[name].to(bucket.flat) for name in sizes])
        for names in [old for old in seen if old != bucket.names and set(old) & set(bucket.names)]:
            for slot in _KEPT.values():
                self._slot(slot).pop(names, None)

    def _slot(self, slot: str) -> dict[tuple[str, ...], Tensor]:
        """One of torch's dictionaries; its keys are those `_HookBucket.index` gives."""
        return getattr(self._state, slot)  # type: ignore[no-any-return]  # torch says int, and only passes it on

    def _forget(self) -> None:
        for slot in _KEPT.values():
            self._slot(slot).clear()

    def _piece_sizes(self, bucket: Bucket) -> dict[str, dict[str, int]]:
        """Values of each parameter in torch's flat tensors, in their order: P and Q are grouped by matrix shape."""
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            whole = shape.numel()
            n = shape[0] if shape else 1
            m = whole // n if n else 0
            r = min(n, m, self._rank)
            if (n + m) * r * self._state.min_compression_rate < whole:
                by_shape.setdefault((n, m), []).append(name)
        grouped = [(name, n, m) for (n, m), names in by_shape.items() for name in names]
        return {
            "error": dict(zip(bucket.names, bucket.sizes, strict=True)),
            "p": {name: n * min(n, m, self._rank) for name, n, m in grouped},
            "q": {name: m * min(n, m, self._rank) for name, n, m in grouped},
        }


@dataclass(frozen=True)
class _HookBucket:
    """What torch's hook wants to know of a bucket; its index, the key of torch's state, is the parameters' names."""

    bucket: Bucket

    def buffer(self) -> Tensor:
        return self.bucket.flat

    def index(self) -> tuple[str, ...]:
        return self.bucket.names

    def gradients(self) -> list[Tensor]:
        pieces = self.bucket.flat.split_with_sizes(self.bucket.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.bucket.shapes, strict=True)]

    def is_last(self) -> bool:
        return False  # would only make torch count steps and log
