"""1-bit codes: the sign of each value, and the mean of the values on either side.

The code of a block of L values is a head of two float32 (the means r0 of the negative and r1 of the other values), and
a body of n = ceil(L / 8) bytes. Value i of the block is bit i div n of byte i mod n: neighbouring values go to
neighbouring bytes, so that packing needs no shuffle across a vector register.

`OneBit` chooses the kernel by device (Numba on the CPU, Triton on CUDA); `encode_reference` and `decode_reference` are
the specification, in plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bigstep.exchange.codecs import Blocks, see_floats

__all__ = ["OneBit", "decode_reference", "encode_reference"]


class OneBit:
    """Sign bits and two means per block.

    For each block, with v = values + kept::

        bit = v >= 0,  r1 = mean of v where bit,  r0 = mean of v where not,  kept = v - (r1 if bit else r0)

    The mean of a side without values is 0. A block with a value that is not finite is sent as NaN.

    Example:
        >>> blocks = Blocks(torch.tensor([0]), torch.tensor([4]), torch.tensor([0]), torch.tensor([8]))
        >>> kept, message, out = torch.zeros(4), torch.zeros(9, dtype=torch.uint8), torch.zeros(4)
        >>> OneBit().encode(torch.tensor([1.0, 3.0, -5.0, 0.0]), kept, blocks, message)
        >>> kept  # the largest magnitudes keep the most for the next step
        tensor([-0.3333,  1.6667,  0.0000, -1.3333])
        >>> OneBit().decode(message, blocks, out)
        >>> out
        tensor([ 1.3333,  1.3333, -5.0000,  1.3333])

    Reference:
        Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs, Interspeech 2014, section 2.

    Differs from the paper:
        Its second equation leaves the old residual out of the new one, which loses error; CNTK, the authors' program,
        keeps it, and so does this. Short rows share a block (`bigstep.tables.codecs.onebit_blocks`).
    """

    def __init__(self, settings: Mapping[str, float] | None = None) -> None:
        """Nothing can be set."""

    def encode(self, values: Tensor, kept: Tensor, blocks: Blocks, message: Tensor) -> None:
        """Write values + kept; float32 or float64, blocks of at most 4096 values."""
        if values.is_cuda:
            from bigstep.exchange.codecs.onebit_triton import encode as encode_cuda

            encode_cuda(values, kept, blocks, message)
            return
        from bigstep.exchange.codecs.onebit_numba import encode_blocks

        encode_blocks(values.numpy(), kept.numpy(), *blocks.as_arrays(), message.numpy(), see_floats(message).numpy())

    def decode(
        self, messages: Tensor, blocks: Blocks, out: Tensor, *, copies: int = 1, stride: int = 0, scale: float = 1
    ) -> None:
        """Write scale x the sum of the messages."""
        if out.is_cuda:
            from bigstep.exchange.codecs.onebit_triton import decode as decode_cuda

            decode_cuda(messages, blocks, out, copies, stride, scale)
            return
        from bigstep.exchange.codecs.onebit_numba import decode_blocks

        heads = see_floats(messages).numpy()
        decode_blocks(messages.numpy(), heads, *blocks.as_arrays(), out.numpy(), copies, stride, float(scale))


def encode_reference(values: Tensor, kept: Tensor, blocks: Blocks, message: Tensor) -> None:
    """`OneBit.encode` in plain torch, block by block."""
    means = see_floats(message)
    for start, length, means_at, bits_at in _rows(blocks):
        block = slice(start, start + length)
        v = values[block] + kept[block]
        bit = v >= 0
        positive, negative = v[bit], v[~bit]
        r1 = (positive.sum() / max(positive.numel(), 1)).float()
        r0 = (negative.sum() / max(negative.numel(), 1)).float()
        if bool(torch.isfinite(v).all()):
            kept[block] = v - torch.where(bit, r1, r0).to(v.dtype)
        else:
            r0, r1 = torch.full_like(r0, torch.nan), torch.full_like(r1, torch.nan)
        means[means_at], means[means_at + 1] = r0, r1
        row = -(-length // 8)
        padded = torch.nn.functional.pad(bit.to(torch.uint8), (0, 8 * row - length)).view(8, row)
        shifts = torch.arange(8, dtype=torch.uint8, device=v.device).unsqueeze(1)
        message[bits_at : bits_at + row] = (padded << shifts).sum(0, dtype=torch.uint8)


def decode_reference(
    messages: Tensor, blocks: Blocks, out: Tensor, *, copies: int = 1, stride: int = 0, scale: float = 1
) -> None:
    """`OneBit.decode` in plain torch, block by block."""
    means = see_floats(messages)
    for start, length, means_at, bits_at in _rows(blocks):
        row = -(-length // 8)
        total = torch.zeros(length, dtype=out.dtype, device=out.device)
        shifts = torch.arange(8, dtype=torch.uint8, device=out.device).unsqueeze(1)
        for copy in range(copies):
            code = messages[copy * stride + bits_at : copy * stride + bits_at + row]
            bit = ((code.unsqueeze(0) >> shifts) & 1).bool().view(-1)[:length]
            r0, r1 = means[copy * stride // 4 + means_at], means[copy * stride // 4 + means_at + 1]
            total += torch.where(bit, r1, r0).to(out.dtype)
        out[start : start + length] = total * scale


def _rows(blocks: Blocks) -> list[tuple[int, int, int, int]]:
    columns = (blocks.starts, blocks.lengths, blocks.heads_at, blocks.bodies_at)
    return list(zip(*(column.tolist() for column in columns), strict=True))
