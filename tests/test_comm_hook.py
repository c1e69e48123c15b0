"""The exchange under DistributedDataParallel: what DDP itself would give, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigstep.exchange import Exchange, Torus, World
from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs.dense import Half
from bigstep.exchange.summed import Summed
from bigstep.tables.codecs import encoded_bytes
from bigstep.tables.collectives import collective_traffic
from worlds import World as Ranks

# small enough for several buckets of a small model
BUCKET_MB = 0.01


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 70), nn.Tanh(), nn.Linear(70, 3))


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(97 * step + rank))


def train(
    exchange: Exchange | None, steps: int, accumulate: int = 1, start: int = 0, model: Any = None
) -> list[Tensor]:
    """Plain SGD on a plain loop that knows nothing of bigstep but `attach`; returns the weights."""
    model = model or make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    if exchange is not None:
        exchange.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for part in range(accumulate - 1):
            with ddp.no_sync():
                ddp(batch_of(dist.get_rank(), 100 * step + part)).square().mean().backward()
        ddp(batch_of(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def compare_with_ddp() -> dict[str, float]:
    plain = train(None, 3)
    accumulated = train(None, 2, accumulate=3)
    differences = {}
    for collective in ("ring", "hierarchical", "torus", "halving", "hybrid"):
        for codec in ("none", "fp16", "bf16"):
            exchange = Exchange(collective, codec, ranks_per_node=2)
            differences[f"{collective} {codec}"] = largest_difference(train(exchange, 3), plain)
            exchange.close()
    taken = set()

    def by_size(nbytes: int, ranks: int) -> str:
        taken.add("ring" if nbytes >= 6_000 else "hierarchical")
        return "ring" if nbytes >= 6_000 else "hierarchical"

    exchange = Exchange("hybrid", ranks_per_node=2)
    with mock.patch("bigstep.exchange.collectives.hybrid.choose_by_size", by_size):  # buckets of both kinds under way
        differences["hybrid none, both ways"] = largest_difference(train(exchange, 3), plain)
    exchange.close()
    assert taken == {"ring", "hierarchical"}
    exchange = Exchange("torus")
    differences["accumulated"] = largest_difference(train(exchange, 2, accumulate=3), accumulated)
    exchange.close()
    return differences


def test_lossless_exchange_trains_as_ddp_does_and_half_precision_nearly(world: Callable[[int], Ranks]) -> None:
    for differences in world(4).run(compare_with_ddp):
        for name, difference in differences.items():
            # weights of order 0.1 change by about 0.01 a step: float32 rounding, or that of 11 and 8 bits
            bound = 3e-8 if "none" in name or "accumulated" in name else 3e-5 if "fp16" in name else 3e-4
            assert difference <= bound, name
            assert difference > 0 or "16" not in name, "half precision rounds"


def agree_on_a_scale() -> list[Tensor]:
    """Half precision as many ranks use it, with four: they agree on a scale before they encode."""
    group = dist.group.WORLD
    assert group is not None
    world = World.join(group, grid=(2, 2))
    rank = dist.get_rank()
    summed = Summed(world, Torus(world), Half(), agrees=True)
    flat = torch.full((5,), 1e-9 * 10.0**rank)
    bucket = Bucket(flat=flat, names=("w",), shapes=(flat.shape,), step=0)
    for under_way in summed.start(bucket):
        for work in under_way:
            work.wait()
    return [flat]


def test_ranks_that_agree_on_a_scale_lose_no_small_gradient(world: Callable[[int], Ranks]) -> None:
    """float16 by itself has nothing below 6e-8."""
    for (mean,) in world(4).run(agree_on_a_scale):
        torch.testing.assert_close(mean, torch.full((5,), 1.111e-6 / 4), rtol=2e-3, atol=0)


def count_bytes() -> list[tuple[str, float, float, float, float]]:
    shapes = [parameter.shape for parameter in make_model().parameters()]
    counted = []
    for collective, codec in [("ring", "none"), ("torus", "fp16"), ("halving", "bf16")]:
        exchange = Exchange(collective, codec, grid=(2, 2))
        train(exchange, 3)
        dense = encoded_bytes(codec, shapes)
        expected = 3 * collective_traffic(collective, dense, 4, grid=(2, 2)).bytes_sent
        counted.append((collective, exchange.bytes_sent, expected, exchange.seconds, exchange.exposed_seconds))
        exchange.close()
    return counted


def test_bytes_sent_are_those_of_the_wire_table(world: Callable[[int], Ranks]) -> None:
    for counted in world(4).run(count_bytes):
        for collective, sent, expected, seconds, exposed in counted:
            # each of at most 4 buckets in 3 steps is filled up to a multiple of 4 values of 2 bytes
            slack = 0 if collective == "ring" else 12 * 2 * 4 * 2
            assert expected <= sent <= expected + slack
            assert 0 < exposed <= seconds * 1.5 + 0.05
