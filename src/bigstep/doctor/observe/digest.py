"""Short digests of tensors, and a linear functional of gradients; none of them touches a generator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["biggest", "digest", "functional", "is_plain", "norms", "rows", "sample", "text_digest"]

ROWS = 64
"""Samples of a batch that are digested, at most."""
VALUES = 512
"""Values of a sample that its digest reads at most, evenly spread."""
SKETCHED = 4096
"""Values of a parameter that a digest or functional reads at most, evenly spread."""


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors in a batch of any structure: tensors, sequences, mappings of them."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each, depth - 1)


def biggest(value: Any) -> Tensor | None:
    """Return the largest dense tensor of a batch, which says most about its samples."""
    found = [t for t in tensors_in(value) if t.dim() >= 1 and t.layout is torch.strided]
    return max(found, key=lambda tensor: tensor.numel(), default=None)


def rows(tensor: Tensor | None) -> tuple[str, ...]:
    """Digest each sample of a batch."""
    if tensor is None or tensor.numel() == 0 or tensor.dim() == 0:
        return ()
    flat = tensor.detach()[:ROWS].reshape(min(len(tensor), ROWS), -1)
    flat = flat[:, :: -(-flat.shape[1] // VALUES)].cpu().contiguous()
    if flat.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    return tuple(hashlib.blake2b(row.tobytes(), digest_size=5).hexdigest() for row in flat.view(torch.uint8).numpy())


def text_digest(content: bytes) -> str:
    """Digest bytes."""
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def is_plain(tensor: Tensor | None) -> bool:
    """Whether a rank holds the whole tensor: dense numbers, no shard of a DTensor."""
    return tensor is not None and not hasattr(tensor, "_local_tensor") and tensor.layout is torch.strided


def sample(tensor: Tensor) -> Tensor:
    """Return values of a tensor, evenly spread, and all of a small one."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // SKETCHED)] if flat.numel() > SKETCHED else flat


def digest(tensors: Iterable[Tensor]) -> str:
    """Digest tensors, bit for bit in the values that are read."""
    content = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        if is_plain(tensor) and tensor.numel() and tensor.device.type != "meta":
            content.update(sample(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


@cache
def _signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20)
    return (torch.randint(0, 2, (SKETCHED,), generator=generator) * 2 - 1).double().to(device)


def functional(tensor: Tensor) -> Tensor:
    """Return a linear functional of a tensor: f(a + b) = f(a) + f(b), so that sums and means can be recognised."""
    values = sample(tensor).double()
    return (values * _signs(values.device)[: values.numel()]).sum()


def norms(tensors: Sequence[Tensor | None]) -> tuple[float, ...]:
    """Return the norm of each tensor; -1 where there is none, or it is not plain."""
    found = [float(t.detach().float().norm()) if t is not None and is_plain(t) else -1.0 for t in tensors]
    return tuple(found)
