"""Codes that cannot be added: each block's owner receives its codes from all ranks and sends the coded mean to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs import BlockCodec, Blocks
from bigstep.exchange.codecs.layout import lay_out
from bigstep.exchange.collectives.gather import Gather
from bigstep.exchange.line import Steps
from bigstep.exchange.residuals import Owners, Pieces, Residuals
from bigstep.exchange.world import World
from bigstep.tables.codecs import BlockCode

__all__ = ["Gathered"]


@dataclass(frozen=True)
class _Layout:
    """Where the blocks of one bucket lie: in the bucket, in each owner's message, and among this owner's own blocks."""

    blocks: Blocks
    """All blocks; offsets into N messages of `message_bytes`, the k-th to (or from) rank k."""
    own: Blocks
    """This rank's blocks; `starts` into a tensor that holds only them, offsets into one message."""
    owned_sizes: list[int]
    """For each parameter, how many of its values this rank owns."""
    message_bytes: int
    """Of the longest message, padded to a multiple of 4 bytes (float32); all messages have this length."""


class Gathered:
    """The two-sided exchange of a block code, with error feedback on both sides.

    With e_r the residual of rank r and E that of a block's owner, Q the code::

        v_r = g_r + e_r,   send Q(v_r) to the owner,   e_r = v_r - Q(v_r)
        V = mean of Q(v_r) + E,   send Q(V) to all,    E = V - Q(V)

    so that over any number of steps  sum of results + E + mean of e_r = sum of mean gradients.

    Args:
        world: The ranks.
        collective: Carries the messages.
        codec: Writes them.
        code: Cuts parameters into blocks and gives the bytes of each.
        shapes: Of all parameters of the model by name, in the same order on all ranks.
        settings: Of the codec; residuals are multiplied by `decay`, if it is among them, in each step.
        error_feedback: Without it both residuals are dropped (training then suffers visibly; for comparison only).

    Reference:
        Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs, Interspeech 2014, sections 2 and 3.

    Differs from the paper:
        Owners send the mean gradient, and the optimizer applies AdaGrad and momentum on every rank; the paper applies
        them on the owner, before the second quantisation. Blocks are dealt to the ranks in turn; the paper cuts the
        model into N contiguous stripes. Any block code may travel this way.
    """

    def __init__(
        self,
        world: World,
        collective: Gather,
        codec: BlockCodec,
        code: BlockCode,
        shapes: Mapping[str, Sequence[int]],
        settings: Mapping[str, float],
        *,
        error_feedback: bool = True,
    ) -> None:
        self._world, self._collective, self._codec, self._code = world, collective, codec, code
        self._settings, self._decay = settings, settings.get("decay", 1.0)
        self._error_feedback = error_feedback
        self._owners = Owners({name: code.cut(shape).lengths for name, shape in shapes.items()})
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self.residuals = Residuals(world.rank, world.size, self._owners)
        self.bytes_sent = 0.0

    def start(self, bucket: Bucket) -> Steps:
        """Encode, hand to owners, average and encode again, hand to all, decode."""
        N = self._world.size
        layout = self._layout(bucket)
        M = layout.message_bytes
        # half-precision gradients are summed in float32; float64 stays float64
        values = bucket.flat if bucket.flat.dtype == torch.float64 else bucket.flat.float()

        outgoing = torch.zeros(N * M, dtype=torch.uint8, device=values.device)
        # Each kind of residual is used in one phase only, hence by one thread, bucket after bucket: no lock is needed,
        # even when DDP has moved parameters to other buckets while old buckets are still under way.
        kept = self._kept(self.residuals.sent, bucket, bucket.sizes, values)
        self._codec.encode(values, kept, layout.blocks, outgoing)
        incoming = torch.empty_like(outgoing)
        turn = self._collective.next_turn()  # taken now: other buckets start before this one's second phase
        yield self._collective.send_to_owners(incoming, outgoing, turn)

        mean = values.new_empty(sum(layout.owned_sizes))
        self._codec.decode(incoming, layout.own, mean, copies=N, stride=M, scale=1 / N)
        message = torch.zeros(M, dtype=torch.uint8, device=values.device)
        kept = self._kept(self.residuals.owned, bucket, layout.owned_sizes, mean)
        self._codec.encode(mean, kept, layout.own, message)
        yield self._collective.send_to_all(outgoing, message, turn)

        self._codec.decode(outgoing, layout.blocks, values)
        if values.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(values)
        self.bytes_sent += self._collective.bytes_sent(message)

    def _kept(self, pieces: Pieces, bucket: Bucket, sizes: list[int], like: Tensor) -> Tensor:
        """The residuals of these blocks from the step before."""
        if not self._error_feedback:
            return like.new_zeros(sum(sizes))
        kept = pieces.flat(bucket.names, sizes, like)
        return kept if self._decay == 1 else kept.mul_(self._decay)

    def _layout(self, bucket: Bucket) -> _Layout:
        if bucket.names not in self._layouts:
            self._layouts[bucket.names] = self._new_layout(bucket)
        return self._layouts[bucket.names]

    def _new_layout(self, bucket: Bucket) -> _Layout:
        rank, N = self._world.rank, self._world.size
        lengths, owners, owned_sizes = [], [], []
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            cut, belongs = self._code.cut(shape).lengths, self._owners.owners(name, N)
            lengths += cut
            owners += belongs
            owned_sizes.append(sum(n for n, k in zip(cut, belongs, strict=True) if k == rank))

        device, settings = bucket.flat.device, self._settings
        blocks, message_bytes = lay_out(self._code, lengths, settings, device, owners, N)
        mine = [length for length, owner in zip(lengths, owners, strict=True) if owner == rank]
        own, _ = lay_out(self._code, mine, settings, device)
        return _Layout(blocks, own, owned_sizes, message_bytes)
