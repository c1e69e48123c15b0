"""Where the blocks of a code lie in messages: in each message all heads, then all bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bigstep.exchange.codecs import Blocks
from bigstep.tables.codecs import BlockCode

__all__ = ["lay_out"]


def lay_out(
    code: BlockCode,
    lengths: Sequence[int],
    settings: Mapping[str, float],
    device: torch.device,
    owners: Sequence[int] | None = None,
    messages: int = 1,
) -> tuple[Blocks, int]:
    """Place the blocks of a tensor, which lie end to end, into messages of equal length, also end to end.

    Args:
        code: Gives the bytes of each block.
        lengths: Number of values of each block.
        settings: Of the codec.
        device: Of the tensor.
        owners: The message that each block goes to; by default there is only one.
        messages: How many there are.

    Returns:
        Where each block lies, and the bytes of a message: those of the longest, padded to a multiple of 4 (float32).
    """
    owners = [0] * len(lengths) if owners is None else owners
    counts = [0] * messages
    for owner in owners:
        counts[owner] += 1
    heads_used, bodies_used = [0] * messages, [code.head_bytes * count for count in counts]
    heads, bodies = [], []
    for length, owner in zip(lengths, owners, strict=True):
        heads.append(heads_used[owner] // 4)
        bodies.append(bodies_used[owner])
        heads_used[owner] += code.head_bytes
        bodies_used[owner] += code.body_bytes(length, settings)
    nbytes = -(-max(bodies_used, default=0) // 4) * 4

    size, message, head, body = (torch.tensor(column, dtype=torch.int64) for column in (lengths, owners, heads, bodies))
    columns = (size.cumsum(0) - size, size, head + message * (nbytes // 4), body + message * nbytes)
    return Blocks(*(column.to(device) for column in columns)), nbytes
