"""Small integers: each value as a multiple of its block's scale, which is the largest |value| over the largest integer.

The code of a block is a head of one float32 (the scale) and a body of one integer per value: a byte, or half a byte
with the earlier value in the lower half.

Reference:
    Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, section 2.1 (scales by block); Douillard et
    al., Streaming DiLoCo, 2025, section 2.3 (4 bits a value between islands).

Differs from the papers:
    Equally spaced levels and rounding to the nearest; what rounding loses is carried to the next step, where stochastic
    rounding would be right on average only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bigstep.exchange.codecs import Blocks, see_floats
from bigstep.exchange.codecs.rows import Rows, counts_of

__all__ = ["Int4", "Int8"]


class Int8:
    """One byte per value: -127 to 127.

    For each block, with v = values + kept::

        s = max |v| / 127,   q = round(v / s),   kept = v - s q

    A block with a value that is not finite has the scale NaN.

    Example:
        >>> blocks = Blocks(torch.tensor([0]), torch.tensor([3]), torch.tensor([0]), torch.tensor([4]))
        >>> kept, message, out = torch.zeros(3), torch.zeros(7, dtype=torch.uint8), torch.zeros(3)
        >>> Int8().encode(torch.tensor([1.27, -0.5, 0.004]), kept, blocks, message)
        >>> Int8().decode(message, blocks, out)
        >>> out, kept
        (tensor([ 1.2700, -0.5000,  0.0000]), tensor([0.0000, 0.0000, 0.0040]))
    """

    largest = 127
    pairs = False  # whether a byte holds two values

    def __init__(self, settings: Mapping[str, float] | None = None) -> None:
        """Nothing can be set."""

    def encode(self, values: Tensor, kept: Tensor, blocks: Blocks, message: Tensor) -> None:
        """Write the scale of each block, and its integers, into a message of zeros."""
        if values.is_cuda:
            self.encode_reference(values, kept, blocks, message)
            return
        from bigstep.exchange.codecs.integers_numba import encode_blocks

        arrays, heads = blocks.as_arrays(), see_floats(message).numpy()
        encode_blocks(values.numpy(), kept.numpy(), *arrays, message.numpy(), heads, self.largest, self.pairs)

    def decode(
        self, messages: Tensor, blocks: Blocks, out: Tensor, *, copies: int = 1, stride: int = 0, scale: float = 1
    ) -> None:
        """Multiply, and add in the order of the messages."""
        if out.is_cuda:
            self.decode_reference(messages, blocks, out, copies=copies, stride=stride, scale=scale)
            return
        from bigstep.exchange.codecs.integers_numba import decode_blocks

        arrays, heads = blocks.as_arrays(), see_floats(messages).numpy()
        decode_blocks(messages.numpy(), heads, *arrays, out.numpy(), copies, stride, float(scale), self.pairs)

    def encode_reference(self, values: Tensor, kept: Tensor, blocks: Blocks, message: Tensor) -> None:
        """`encode` in plain torch, on any device."""
        rows = Rows.of(blocks.starts, counts_of(blocks, "values"))
        v = rows.spread(values + kept)
        scale = (v.abs().amax(1) / self.largest).float() if v.numel() else v.new_zeros(len(v))
        wide = scale.to(v.dtype).unsqueeze(1)
        steps = torch.where(wide > 0, v / wide, 0.0).round_().clamp_(-self.largest, self.largest)
        rest = torch.where(torch.isfinite(wide), v - steps * wide, rows.spread(kept))
        kept.copy_(rows.join(rest))
        see_floats(message)[blocks.heads_at] = torch.where(torch.isfinite(scale), scale, torch.nan)
        bodies = self._bodies(blocks)
        message[bodies.at] = bodies.join(self._pack(steps.nan_to_num_(0.0).to(torch.int8)))

    def decode_reference(
        self, messages: Tensor, blocks: Blocks, out: Tensor, *, copies: int = 1, stride: int = 0, scale: float = 1
    ) -> None:
        """`decode` in plain torch, on any device."""
        rows, bodies = Rows.of(blocks.starts, counts_of(blocks, "values")), self._bodies(blocks)
        total = out.new_zeros(len(blocks.lengths), rows.counts.most)
        for copy in range(copies):
            body = bodies.spread(messages[bodies.at + copy * stride])
            head = see_floats(messages)[blocks.heads_at + copy * stride // 4].to(out.dtype)
            total += self._unpack(body)[:, : total.shape[1]] * head.unsqueeze(1)
        out.copy_(rows.join(total.mul_(scale)))

    def _bodies(self, blocks: Blocks) -> Rows:
        return Rows.of(blocks.bodies_at, counts_of(blocks, "values"))

    def _pack(self, steps: Tensor) -> Tensor:
        return steps.view(torch.uint8)

    def _unpack(self, body: Tensor) -> Tensor:
        return body.view(torch.int8)


class Int4(Int8):
    """Half a byte per value: -7 to 7; otherwise as `Int8`."""

    largest = 7
    pairs = True

    def _bodies(self, blocks: Blocks) -> Rows:
        return Rows.of(blocks.bodies_at, counts_of(blocks, "pairs", lambda lengths: (lengths + 1) // 2))

    def _pack(self, steps: Tensor) -> Tensor:
        filled = torch.nn.functional.pad(steps + 8, (0, steps.shape[1] % 2)).view(torch.uint8)
        return filled[:, 0::2] | (filled[:, 1::2] << 4)

    def _unpack(self, body: Tensor) -> Tensor:
        pairs = torch.stack([body & 15, body >> 4], dim=2)
        return pairs.view(len(body), 2 * body.shape[1]).view(torch.int8) - 8
