"""Only the largest values: of each chunk of 4,096 the few that matter most, with their places.

The code of a chunk has no head; its body is 4 bytes for each value that is sent. The lower two are its place in the
chunk; once they are cleared, the 4 bytes are the value as float32 (with the 8 significant bits of bfloat16).

Reference:
    Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025: the largest 64 of each 4,096 values,
    with error feedback that decays by 0.95.

Differs from the paper:
    Values have 16 bits instead of 2; a chunk is cut from the flat parameter instead of being a 64 x 64 tile; here the
    mean is coded again by the owner of each chunk, so that what a rank receives does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bigstep.exchange.codecs import Blocks, see_floats
from bigstep.exchange.codecs.rows import Counts, Rows, counts_of
from bigstep.tables.codecs import count_largest, fill_settings

__all__ = ["TopK"]


class TopK:
    """The largest values of each chunk, in bfloat16.

    For each chunk, with v = values + kept: send the k largest |v| with their places; kept = v - what was sent.

    Args:
        settings: `keep`, how many of 4,096 values are sent; a shorter chunk sends its share, rounded up.

    Example:
        >>> blocks = Blocks(torch.tensor([0]), torch.tensor([4]), torch.tensor([0]), torch.tensor([0]))
        >>> kept, message, out = torch.zeros(4), torch.zeros(4, dtype=torch.uint8), torch.zeros(4)
        >>> TopK().encode(torch.tensor([1.0, 3.0, -5.0, 0.0]), kept, blocks, message)
        >>> TopK().decode(message, blocks, out)
        >>> out, kept
        (tensor([ 0.,  0., -5.,  0.]), tensor([1., 3., 0., 0.]))
    """

    def __init__(self, settings: Mapping[str, float] | None = None) -> None:
        self._settings = fill_settings(settings or {})

    def encode(self, values: Tensor, kept: Tensor, blocks: Blocks, message: Tensor) -> None:
        """Write the largest values of each chunk with their places."""
        if values.is_cuda:
            self.encode_reference(values, kept, blocks, message)
            return
        from bigstep.exchange.codecs.topk_numba import encode_blocks

        starts, lengths, _, bodies_at = blocks.as_arrays()
        words, floats = message.view(torch.int32).numpy(), see_floats(message).numpy()
        counts = self._sent(blocks).each.numpy()
        encode_blocks(values.numpy(), kept.numpy(), starts, lengths, counts, bodies_at // 4, words, floats)

    def decode(
        self, messages: Tensor, blocks: Blocks, out: Tensor, *, copies: int = 1, stride: int = 0, scale: float = 1
    ) -> None:
        """Put the values in their places, and add in the order of the messages."""
        if out.is_cuda:
            self.decode_reference(messages, blocks, out, copies=copies, stride=stride, scale=scale)
            return
        from bigstep.exchange.codecs.topk_numba import decode_blocks

        starts, _, _, bodies_at = blocks.as_arrays()
        words, counts = messages.view(torch.int32).numpy(), self._sent(blocks).each.numpy()
        decode_blocks(words, starts, counts, bodies_at // 4, out.numpy(), copies, stride // 4, float(scale))

    def encode_reference(self, values: Tensor, kept: Tensor, blocks: Blocks, message: Tensor) -> None:
        """`encode` in plain torch, on any device."""
        rows = Rows.of(blocks.starts, counts_of(blocks, "values"))
        v = rows.spread(values + kept)
        words = Rows.of(blocks.bodies_at // 4, self._sent(blocks))
        size = v.abs().masked_fill_(~rows.inside, -1.0)
        places = size.topk(words.counts.most, dim=1).indices  # NaN counts as the largest
        sent = v.gather(1, places).to(torch.bfloat16).float()
        rest = v.scatter_add(1, places, -torch.where(words.inside, sent, 0.0).to(v.dtype))
        finite = torch.isfinite(rest).all(1, keepdim=True)
        kept.copy_(rows.join(torch.where(finite, rest, rows.spread(kept))))
        message.view(torch.int32)[words.at] = words.join(sent.view(torch.int32) | places.int())

    def decode_reference(
        self, messages: Tensor, blocks: Blocks, out: Tensor, *, copies: int = 1, stride: int = 0, scale: float = 1
    ) -> None:
        """`decode` in plain torch, on any device."""
        words = Rows.of(blocks.bodies_at // 4, self._sent(blocks))
        first = torch.repeat_interleave(blocks.starts, words.counts.each, output_size=words.counts.total)
        out.zero_()
        for copy in range(copies):
            word = messages.view(torch.int32)[words.at + copy * stride // 4]
            out[first + (word & 0xFFFF)] += (word & -0x10000).view(torch.float32).to(out.dtype)
        out.mul_(scale)

    def _sent(self, blocks: Blocks) -> Counts:
        """How many values of each chunk are sent."""

        def count(lengths: Tensor) -> Tensor:
            counts = [count_largest(length, self._settings) for length in lengths.tolist()]
            return torch.tensor(counts, dtype=torch.int64, device=lengths.device)

        return counts_of(blocks, ("sent", self._settings["keep"]), count)
