"""PowerSGD through torch's own hook, with its state kept by parameter instead of by bucket."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from bigstep.exchange.bucket import Bucket
from bigstep.exchange.line import Steps
from bigstep.exchange.residuals import Pieces, Residuals
from bigstep.exchange.world import World
from bigstep.tables.codecs import encoded_bytes
from bigstep.tables.collectives import collective_traffic

__all__ = ["PowerSGD"]


class PowerSGD:
    """Low-rank approximation of each gradient, M = P Q^T, with error feedback and warm start.

    One bucket at a time: torch's hook starts its second and third all-reduce in callbacks, whose order may differ from
    rank to rank while several buckets are under way.

    A column of Q that holds only zeros, as after a gradient of 0, would be divided by its length of 0 in the next step;
    it gets random values instead, the same on all ranks. A bucket that is not finite on one rank comes back so on all,
    and leaves the residuals as they were.

    Args:
        world: The ranks.
        settings: `rank` of the approximation.
        start_step: The first compressed step; torch allows 2 at the earliest, after DDP's last change of buckets.
        error_feedback: Carry what the approximation misses into the next step.

    Reference:
        Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
        2019, algorithms 1 and 2.
    """

    def __init__(self, world: World, settings: Mapping[str, float], start_step: int, error_feedback: bool) -> None:
        self._world = world
        self._rank = int(settings["rank"])
        self._start = max(2, start_step)
        self._state = PowerSGDState(
            process_group=world.new_group(world.everyone()),
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=self._start,
            use_error_feedback=error_feedback,
        )
        self.residuals = Residuals(world.rank, world.size, shared=("p", "q"))
        self.bytes_sent = 0.0

    def start(self, bucket: Bucket) -> Steps:
        """One step, in which torch's hook runs from beginning to end."""
        # added to the length by which a column is divided: too small to matter unless that length is 0
        self._state.orthogonalization_epsilon = min(torch.finfo(bucket.flat.dtype).tiny ** 0.5, 1e-4)
        self._state.iter = bucket.step  # torch counts last buckets; the exchange's own count survives a resume
        coded = bucket.step >= self._start
        if coded:
            self._hand_over(bucket)
        written = encoded_bytes("powersgd" if coded else "none", bucket.shapes, rank=self._rank)
        nbytes = written * bucket.flat.element_size() / 4
        self.bytes_sent += collective_traffic("ring", nbytes, self._world.size).bytes_sent
        powerSGD_hook(self._state, _HookBucket(bucket)).wait()  # type: ignore[arg-type]  # it has the same methods
        if coded:
            self._take_back(bucket)
        yield []

    def _hand_over(self, bucket: Bucket) -> None:
        """Give torch's state what is carried for this bucket; torch itself makes what is new."""
        for pieces, slot, sizes in self._kinds(bucket):
            if not sizes or not pieces.knows(list(sizes)):
                continue
            slot[_KEY] = pieces.flat(list(sizes), list(sizes.values()), bucket.flat)
            if slot is self._state.q_memory_dict:
                for name, q in zip(sizes, slot[_KEY].split_with_sizes(list(sizes.values())), strict=True):
                    _revive(q.view(-1, self._rank), f"{name} in step {bucket.step}")

    def _take_back(self, bucket: Bucket) -> None:
        finite = bool(torch.isfinite(bucket.flat).all())  # the same on all ranks: NaN on one has spread to all
        for pieces, slot, sizes in self._kinds(bucket):
            if _KEY not in slot:
                continue
            found = slot.pop(_KEY)
            if finite:
                pieces.put(list(sizes), list(sizes.values()), found)
            elif pieces is not self.residuals.sent:  # torch has overwritten P and Q in place
                pieces.put(list(sizes), list(sizes.values()), torch.zeros_like(found))

    def _kinds(self, bucket: Bucket) -> list[tuple[Pieces, dict[int, Tensor], dict[str, int]]]:
        """What is carried, its place in torch's state, and how many values each parameter has there, in order.

        P and Q are grouped by the shape of the matrices.
        """
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            whole = shape.numel()
            n = shape[0] if shape else 1
            m = whole // n if n else 0
            if (n + m) * min(n, m, self._rank) * self._state.min_compression_rate < whole:
                by_shape.setdefault((n, m), []).append(name)
        grouped = [(name, n, m) for (n, m), names in by_shape.items() for name in names]
        p = {name: n * min(n, m, self._rank) for name, n, m in grouped}
        q = {name: m * min(n, m, self._rank) for name, n, m in grouped}
        residuals, state = self.residuals, self._state
        return [
            (residuals.sent, state.error_dict, dict(zip(bucket.names, bucket.sizes, strict=True))),
            (residuals.shared["p"], state.p_memory_dict, p),
            (residuals.shared["q"], state.q_memory_dict, q),
        ]


def _revive(q: Tensor, seed: str) -> None:
    """Fill the columns of a factor that are 0 at random, the same on all ranks; no step would ever change them."""
    lost = (q == 0).all(0)
    if bool(lost.any()):
        chance = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        q.copy_(torch.where(lost, torch.randn(q.shape, generator=chance).to(q), q))


# torch keeps its state by bucket index; here it holds the state of one bucket at a time
_KEY = 0


@dataclass(frozen=True)
class _HookBucket:
    """A bucket with the methods that torch's hook calls."""

    bucket: Bucket

    def buffer(self) -> Tensor:
        return self.bucket.flat

    def index(self) -> int:
        return _KEY

    def gradients(self) -> list[Tensor]:
        """Gradients that torch can view as matrices: a scalar as a vector of one value; empty ones are left out."""
        pieces = zip(self.bucket.flat.split_with_sizes(self.bucket.sizes), self.bucket.shapes, strict=True)
        return [piece.view(shape or (1,)) for piece, shape in pieces if piece.numel()]

    def is_last(self) -> bool:
        return False  # would only make torch count steps and log
