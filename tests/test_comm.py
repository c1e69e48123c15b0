"""Collectives equal the sum in float64, on any length and world, and leave the same bits on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange import Halving, Hierarchical, Hybrid, Ring, Torus, World, sum_over_ranks
from worlds import World as Ranks

LENGTHS = (0, 1, 7, 1_000_003)
# relative to the largest sum of magnitudes: each of at most 8 additions rounds once
TOLERANCE = {torch.float64: 1e-15, torch.float32: 8e-7, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def values_of(rank: int, length: int, seed: int) -> Tensor:
    return torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))


def same_bits_everywhere(tensor: Tensor) -> bool:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    first = flat.clone()
    if flat.numel():
        dist.broadcast(first, 0)
    return torch.equal(first, flat)


@functools.cache
def inputs_and_sum(size: int, rank: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """This rank's input, the sum over all ranks in float64, and the largest sum of magnitudes."""
    parts = [values_of(r, length, length).to(dtype).double() for r in range(size)]
    scale = float(sum(part.abs() for part in parts).max()) if length else 0.0
    return parts[rank].to(dtype), torch.stack(parts).sum(0), scale


def check(collective: Any, size: int, rank: int, types: tuple[torch.dtype, ...]) -> list[str]:
    """Names of the cases that went wrong."""
    wrong = []
    for length in LENGTHS:
        for dtype in types if length < 1000 else (torch.float32,):
            mine, exact, scale = inputs_and_sum(size, rank, length, dtype)
            tensor = mine.clone()
            sum_over_ranks(collective, tensor)
            error = float((tensor.double() - exact).abs().max()) if length else 0.0
            if not (error <= TOLERANCE[dtype] * scale and same_bits_everywhere(tensor)):
                wrong.append(f"{type(collective).__name__} {length} {dtype} {error}")
    whole = torch.stack([values_of(rank, 35, 5).view(5, 7)] * 3, dim=-1)[..., 1].t()
    assert not whole.is_contiguous()
    expected = torch.stack([values_of(r, 35, 5).view(5, 7).t() for r in range(size)]).sum(0)
    sum_over_ranks(collective, whole)
    if not torch.allclose(whole, expected, rtol=0, atol=1e-14):
        wrong.append(f"{type(collective).__name__} not contiguous")
    return wrong


def check_all(grids: list[tuple[int, int]], nodes: list[int]) -> list[str]:
    world_group = dist.group.WORLD
    assert world_group is not None
    size, rank = dist.get_world_size(), dist.get_rank()
    wrong = []
    types = tuple(TOLERANCE)
    world = World.join(world_group)
    for kind in (Ring, Halving):
        wrong += check(kind(world), size, rank, types)
    for number, grid in enumerate(grids):
        wrong += check(Torus(World.join(world_group, grid=grid)), size, rank, types if number == 0 else types[:1])
    for number, per_node in enumerate(nodes):
        collective = Hierarchical(World.join(world_group, ranks_per_node=per_node))
        wrong += check(collective, size, rank, types if number == 0 else types[:1])
    if size == 4:  # the longest goes around a ring, the others by way of leaders
        wrong += check(Hybrid(World.join(world_group, ranks_per_node=2)), size, rank, types[:2])
    inputs_and_sum.cache_clear()  # the process lives on
    return wrong


@pytest.mark.parametrize(
    ("size", "grids", "nodes"),
    [
        (2, [(1, 2), (2, 1)], [1, 2]),
        (3, [(3, 1)], [3]),
        (4, [(2, 2), (1, 4), (4, 1)], [2]),
        (6, [(2, 3), (3, 2)], [3, 2]),
        (8, [(4, 2)], [4]),
    ],
)
def test_every_collective_equals_the_sum_in_float64(
    world: Callable[[int], Ranks], size: int, grids: list[tuple[int, int]], nodes: list[int]
) -> None:
    assert world(size).run(check_all, grids, nodes) == [[]] * size
