"""The bucket tuner: trial steps are steps of training, all ranks choose alike, and noise chooses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigstep.exchange import BucketTuner, Exchange
from bigstep.exchange.buckets import DDP_DEFAULT_MB
from test_comm_hook import batch_of, largest_difference, make_model, train
from worlds import World as Ranks


def tuned_run(settings: dict[str, Any]) -> tuple[float, list[dict[str, Any]], float, bool, int]:
    steps = 20
    exchange = Exchange(**settings)
    model = make_model()
    made = []

    def make_ddp(bucket_mb: float) -> DistributedDataParallel:
        made.append(bucket_mb)
        ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        exchange.attach(ddp)
        return ddp

    tuner = BucketTuner(make_ddp, sizes=(0.005, 0.02), steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        tuner.ddp(batch_of(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        tuner.step_ended()
    weights: list[Tensor] = [parameter.detach() for parameter in model.parameters()]
    plain = Exchange(**settings)
    difference = largest_difference(weights, train(plain, steps))
    exchange.close()
    plain.close()
    return difference, tuner.table, tuner.bucket_mb, tuner.done, len(made)


def test_trials_do_not_change_the_run_and_are_recorded(world: Callable[[int], Ranks]) -> None:
    for settings in ({}, {"collective": "gather", "codec": "onebit"}):
        results = world(2).run(tuned_run, settings)
        for difference, table, chosen, done, made in results:
            assert done
            # two ranks: their sum has no order, and 1-bit blocks belong to parameters, so buckets change no bit
            assert difference == 0
            assert [row["bucket_mb"] for row in table] == [DDP_DEFAULT_MB, 0.005, 0.02]
            assert all(row["n"] == 3 and 0 < row["min_s"] <= row["median_s"] <= row["max_s"] for row in table)
            assert made in (3, 4), "the last size tried is kept, or another made again"
            assert chosen == results[0][2]


def choose(default: list[float], other: list[float]) -> float:
    """The choice from made-up times; the tuner's own clock is not asked."""
    tuner = BucketTuner(lambda _: DistributedDataParallel(make_model()), sizes=(4.0,))
    tuner._seen = {DDP_DEFAULT_MB: default, 4.0: other}
    return tuner._choice()


def test_only_a_clear_gain_replaces_the_default(world: Callable[[int], Ranks]) -> None:
    ranks = world(2)
    assert ranks.run(choose, [1.0, 1.1, 1.2], [0.8, 0.9, 1.3]) == [4.0, 4.0]
    assert ranks.run(choose, [0.9, 1.1, 1.2], [0.8, 1.0, 1.3]) == [DDP_DEFAULT_MB] * 2
