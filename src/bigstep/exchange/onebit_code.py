"""1-bit codes with error feedback: what goes into a message, and what stays behind.

A tensor is cut into blocks. Block b of L values lies at `starts[b]`; its code is two float32 (the means r0 of the
negative and r1 of the other values) at float32 index `means_at[b]` of the message, and n = ceil(L / 8) bytes at byte
`bits_at[b]`. Value i of the block is bit i div n of byte i mod n: neighbouring values go to neighbouring bytes, so
that packing needs no shuffle across a vector register.

The functions here choose the kernel by device (Numba on the CPU, Triton on CUDA); `encode_reference` and
`decode_reference` are the specification, in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Blocks", "decode", "decode_reference", "encode", "encode_reference"]


@dataclass(frozen=True)
class Blocks:
    """Where blocks lie in a flat tensor and in a message; int64 tensors of one length, on the tensor's device."""

    starts: Tensor
    """First value of each block."""
    lengths: Tensor
    """Values of each block, at most 4096 (`bigstep.tables.codecs.ONEBIT_MAX_BLOCK`)."""
    means_at: Tensor
    """Index of r0 in the message as float32; r1 follows."""
    bits_at: Tensor
    """First byte of the bits in the message."""


def encode(values: Tensor, residual: Tensor, blocks: Blocks, message: Tensor) -> None:
    """Write values + residual as 1-bit codes into `message`, and what they miss into `residual`, both in place.

    For each block, with v = values + residual::

        bit = v >= 0,  r1 = mean of v where bit,  r0 = mean of v where not,  residual = v - (r1 if bit else r0)

    A side without values has mean 0. A block with a value that is not finite is sent as NaN, so that every rank sees
    it, and keeps its residual.

    Args:
        values: Flat gradient, float32 or float64.
        residual: Same size and type; carried from step to step.
        blocks: Where each block lies.
        message: uint8, large enough for every block.

    Example:
        >>> table = torch.tensor([0]), torch.tensor([4]), torch.tensor([0]), torch.tensor([8])
        >>> residual, message = torch.zeros(4), torch.zeros(9, dtype=torch.uint8)
        >>> encode(torch.tensor([1.0, 3.0, -5.0, 0.0]), residual, Blocks(*table), message)
        >>> residual  # the largest magnitudes keep the most for the next step
        tensor([-0.3333,  1.6667,  0.0000, -1.3333])

    Reference:
        Seide, Fu, Droppo, Li and Yu, 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs, Interspeech 2014, section 2.

    Differs from the paper:
        Its second equation leaves the old residual out of the new one, which loses error; CNTK, the authors' program,
        keeps it, and so does this.
    """
    if values.is_cuda:
        from bigstep.exchange.onebit_triton import encode as encode_cuda

        encode_cuda(values, residual, blocks, message)
        return
    from bigstep.exchange.onebit_numba import encode_blocks

    encode_blocks(
        values.numpy(),
        residual.numpy(),
        *_tables(blocks),
        message.numpy(),
        message.numpy()[: _whole(message)].view("f4"),
    )


def decode(
    messages: Tensor, blocks: Blocks, out: Tensor, *, copies: int = 1, stride: int = 0, scale: float = 1
) -> None:
    """Write scale x the sum of `copies` messages, `stride` bytes apart, into the blocks of `out`.

    The sum is taken in the order of copies, so it has the same bits wherever it is taken.

    Example:
        >>> table = torch.tensor([0]), torch.tensor([4]), torch.tensor([0]), torch.tensor([8])
        >>> message, out = torch.zeros(9, dtype=torch.uint8), torch.zeros(4)
        >>> encode(torch.tensor([1.0, 3.0, -5.0, 0.0]), torch.zeros(4), Blocks(*table), message)
        >>> decode(message, Blocks(*table), out)
        >>> out
        tensor([ 1.3333,  1.3333, -5.0000,  1.3333])
    """
    if out.is_cuda:
        from bigstep.exchange.onebit_triton import decode as decode_cuda

        decode_cuda(messages, blocks, out, copies, stride, scale)
        return
    from bigstep.exchange.onebit_numba import decode_blocks

    raw = messages.numpy()
    decode_blocks(raw, raw[: _whole(messages)].view("f4"), *_tables(blocks), out.numpy(), copies, stride, scale)


def encode_reference(values: Tensor, residual: Tensor, blocks: Blocks, message: Tensor) -> None:
    """`encode` in plain torch, one block after the other."""
    means = message[: _whole(message)].view(torch.float32)
    for start, length, means_at, bits_at in _rows(blocks):
        block = slice(start, start + length)
        v = values[block] + residual[block]
        bit = v >= 0
        positive, negative = v[bit], v[~bit]
        r1 = (positive.sum() / max(positive.numel(), 1)).float()
        r0 = (negative.sum() / max(negative.numel(), 1)).float()
        if bool(torch.isfinite(v).all()):
            residual[block] = v - torch.where(bit, r1, r0).to(v.dtype)
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
    """`decode` in plain torch, one block after the other."""
    means = messages[: _whole(messages)].view(torch.float32)
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


def _whole(message: Tensor) -> int:
    """Bytes of the message that can be seen as float32."""
    return message.numel() // 4 * 4


def _rows(blocks: Blocks) -> list[tuple[int, int, int, int]]:
    columns = (blocks.starts, blocks.lengths, blocks.means_at, blocks.bits_at)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _tables(blocks: Blocks) -> tuple[object, object, object, object]:
    return blocks.starts.numpy(), blocks.lengths.numpy(), blocks.means_at.numpy(), blocks.bits_at.numpy()
