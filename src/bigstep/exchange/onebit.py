"""The two-sided 1-bit exchange: an owner for each block receives it quantised from all, and sends the mean quantised.

The cost does not depend on the number of ranks: a rank sends its codes once to their owners, and its own blocks'
means once to everybody. Ownership goes round over the blocks of the whole model (block i of the model belongs to rank
i mod N), so it does not depend on how DDP groups parameters into buckets, and every bucket is spread over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigstep.exchange.codecs import Bucket
from bigstep.exchange.collectives import all_gather, all_to_all
from bigstep.exchange.error_feedback import Residuals, mean_over_ranks
from bigstep.exchange.line import Steps
from bigstep.exchange.onebit_code import Blocks, decode, encode
from bigstep.exchange.world import World
from bigstep.tables.codecs import onebit_blocks

__all__ = ["OneBit"]


@dataclass(frozen=True)
class _Layout:
    """Where the blocks of one bucket lie: in it, in the message to each owner, and in this owner's own part of it."""

    blocks: Blocks
    """All blocks; offsets into N messages of `message_bytes`, the k-th to (or from) rank k."""
    own: Blocks
    """This rank's blocks; `starts` into a tensor that holds only them, offsets into one message."""
    owned_sizes: list[int]
    """Values of each parameter that this rank owns."""
    message_bytes: int
    """Of the longest message, filled up to whole float32; all messages have this length."""


class OneBit:
    """1-bit SGD's exchange with error feedback on both sides.

    With e_r the residual of rank r and E that of a block's owner, Q the 1-bit code of `bigstep.exchange.onebit_code`::

        v_r = g_r + e_r,   send Q(v_r) to the owner,   e_r = v_r - Q(v_r)
        V = mean of Q(v_r) + E,   send Q(V) to all,    E = V - Q(V)

    so that over any number of steps  sum of results + E + mean of e_r = sum of mean gradients.

    Args:
        world: The ranks.
        shapes: Of all parameters of the model by name, in one order on all ranks.
        error_feedback: Without it both residuals are dropped (training then suffers visibly; for comparison only).

    Reference:
        Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs, Interspeech 2014, sections 2 and 3.

    Differs from the paper:
        Short rows share a block (`bigstep.tables.codecs.onebit_blocks`); owners send the mean gradient, and AdaGrad and
        momentum are the optimizer's, on every rank alike, where the paper applies them on the owner before the second
        quantisation; blocks go round over the ranks where the paper cuts the model into N contiguous stripes.
    """

    def __init__(self, world: World, shapes: Mapping[str, Sequence[int]], error_feedback: bool = True) -> None:
        self._world = world
        self._shapes = dict(shapes)
        self._error_feedback = error_feedback
        self._started = 0
        self._to_owners = world.new_group(world.everyone())
        self._to_all = world.new_group(world.everyone())
        self._sent, self._owned = Residuals(), Residuals()
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._first: dict[str, int] = {}
        count = 0
        for name, shape in self._shapes.items():
            self._first[name] = count
            count += len(onebit_blocks(shape))
        self.bytes_sent = 0.0

    def start(self, bucket: Bucket) -> Steps:
        """Encode, hand to owners, average and encode again, hand to all, decode."""
        N = self._world.size
        layout = self._layout(bucket)
        M = layout.message_bytes
        # gradients in half precision are added up in float32; float64 stays
        values = bucket.flat if bucket.flat.dtype == torch.float64 else bucket.flat.float()

        outgoing = torch.zeros(N * M, dtype=torch.uint8, device=values.device)
        # Each kind of residual is touched in one step only, hence by one thread, bucket after bucket: no lock is needed
        # even while DDP moves parameters to other buckets and old buckets are still on their way.
        encode(values, self._residual(self._sent, bucket, bucket.sizes, values), layout.blocks, outgoing)
        incoming = torch.empty_like(outgoing)
        self._started += 1
        turn, everyone = self._started, self._world.everyone()  # other buckets start before this one's second phase
        yield all_to_all(incoming, outgoing, self._world, everyone, self._to_owners, turn)

        mean = values.new_empty(sum(layout.owned_sizes))
        decode(incoming, layout.own, mean, copies=N, stride=M, scale=1 / N)
        message = torch.zeros(M, dtype=torch.uint8, device=values.device)
        encode(mean, self._residual(self._owned, bucket, layout.owned_sizes, mean), layout.own, message)
        yield all_gather(outgoing, message, self._world, everyone, self._to_all, turn)

        decode(outgoing, layout.blocks, values)
        if values.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(values)
        self.bytes_sent += 2 * (N - 1) * M

    def scale(self, factor: float) -> None:
        """Multiply all residuals, for example when the loss is scaled by another number."""
        self._sent.scale(factor)
        self._owned.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals; of the owners' those of its own blocks, one behind the other."""
        return {"sent": self._sent.state_dict(), "owned": self._owned.state_dict()}

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """All ranks' residuals; the owners' put together, so that each element appears once."""
        owned: dict[str, Tensor] = {}
        for name in sorted({name for state in states for name in state["owned"]}):
            lengths = onebit_blocks(self._shapes[name])
            parts = [iter(self._own_pieces(state["owned"].get(name), name, r, len(states)))
                     for r, state in enumerate(states)]  # fmt: skip
            pieces = [next(parts[(self._first[name] + i) % len(states)]) for i in range(len(lengths))]
            owned[name] = torch.cat(pieces)
        sent = {str(rank): state["sent"] for rank, state in enumerate(states)}
        return {"sent_by_rank": sent, "owned_by_all": owned}

    def load(self, state: dict[str, Any]) -> None:
        """Each rank takes its own residual if their number is the same, else the mean of all (`mean_over_ranks`).

        The owners' residuals count in the mean gradient itself, whoever holds them: each goes to the new owner of its
        elements, unchanged.
        """
        if "sent" in state:
            self._sent.load(state["sent"])
            self._owned.load(state["owned"])
            return
        by_rank: dict[str, dict[str, Tensor]] = state["sent_by_rank"]
        rank, N = self._world.rank, self._world.size
        self._sent.load(by_rank[str(rank)] if len(by_rank) == N else mean_over_ranks(list(by_rank.values())))
        mine = {}
        for name, whole in state["owned_by_all"].items():
            blocks = whole.split_with_sizes(onebit_blocks(self._shapes[name]))
            kept = [block for i, block in enumerate(blocks, self._first[name]) if i % N == rank]
            mine[name] = torch.cat(kept) if kept else whole.new_zeros(0)
        self._owned.load(mine)

    def _own_pieces(self, owned: Tensor | None, name: str, rank: int, ranks: int) -> Sequence[Tensor]:
        """The residual of a parameter that `rank` of `ranks` holds, cut into its blocks."""
        lengths = [n for i, n in enumerate(onebit_blocks(self._shapes[name]), self._first[name]) if i % ranks == rank]
        return (torch.zeros(sum(lengths)) if owned is None else owned).split_with_sizes(lengths) if lengths else []

    def _residual(self, residuals: Residuals, bucket: Bucket, sizes: list[int], like: Tensor) -> Tensor:
        if not self._error_feedback:
            return like.new_zeros(sum(sizes))
        return residuals.flat(bucket.names, sizes, like)

    def _layout(self, bucket: Bucket) -> _Layout:
        if bucket.names not in self._layouts:
            self._layouts[bucket.names] = self._new_layout(bucket)
        return self._layouts[bucket.names]

    def _new_layout(self, bucket: Bucket) -> _Layout:
        rank, N = self._world.rank, self._world.size
        lengths, owners, owned_sizes = [], [], []
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            cut = onebit_blocks(shape)
            belongs = [(self._first[name] + i) % N for i in range(len(cut))]
            lengths += cut
            owners += belongs
            owned_sizes.append(sum(n for n, k in zip(cut, belongs, strict=True) if k == rank))

        counts = [owners.count(k) for k in range(N)]
        means_used, bits_used = [0] * N, [8 * count for count in counts]  # a message: all means, then all bits
        means_at, bits_at = [], []
        for length, k in zip(lengths, owners, strict=True):
            means_at.append(means_used[k] // 4)
            bits_at.append(bits_used[k])
            means_used[k] += 8
            bits_used[k] += -(-length // 8)
        M = -(-max(bits_used, default=0) // 4) * 4

        device = bucket.flat.device
        size, owner = torch.tensor(lengths, dtype=torch.int64), torch.tensor(owners, dtype=torch.int64)
        means, bits = torch.tensor(means_at, dtype=torch.int64), torch.tensor(bits_at, dtype=torch.int64)
        mine = owner == rank
        blocks = Blocks(*_on(device, size.cumsum(0) - size, size, means + owner * (M // 4), bits + owner * M))
        own = Blocks(*_on(device, size[mine].cumsum(0) - size[mine], size[mine], means[mine], bits[mine]))
        return _Layout(blocks, own, owned_sizes, M)


def _on(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]
