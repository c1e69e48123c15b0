"""Faults that people have really made, each planted in one piece of bigstep's own loop.

Every function here is what a loop with that fault would do; nothing else about the run changes. They lie in a module of
their own because rank processes import them by name.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bigstep.engine.connect import make_exchange
from torch import Tensor, nn

from bigstep.check import Own, Subject, Trial, bigstep_loop
from bigstep.config import ExchangeConfig
from bigstep.data.feed import Feed
from bigstep.data.sampler import Position, Sampler, Step, hosted_workers
from bigstep.engine.build import Parts
from bigstep.engine.checkpoint import save_checkpoint
from bigstep.engine.ranks import Ranks
from bigstep.engine.run import capture
from bigstep.exchange import Exchange
from bigstep.norm import WorkerStatistics
from bigstep.schedules import BatchPlan

LOOP = bigstep_loop()


class Pairs(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Small noisy images: each look at one draws fresh noise from torch's generator, as random transforms do."""

    classes = ("a", "b", "c")

    def __init__(self, count: int = 130) -> None:
        self.images = torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = 0.1 * torch.randn(1, 6, 6, dtype=torch.float64)
        return self.images[index] + noise, index % 3


class Net(nn.Module):
    """Convolution, batch norm, dropout, two linear layers: everything a fault can hide behind, in 600 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2)
        self.hidden, self.out = nn.Linear(64, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.out(torch.relu(self.hidden(self.drop(x))))


def different_seeds_per_rank(own: Own, trial: Trial, ranks: Ranks) -> Parts:
    parts = LOOP.start(own, trial, ranks)
    torch.manual_seed(trial.config.seed + ranks.rank)
    for module in parts.model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return parts


def one_rank_with_another_order(own: Own, trial: Trial, ranks: Ranks) -> Parts:
    parts = LOOP.start(own, trial, ranks)
    if ranks.rank == 1:
        layers = parts.model._modules
        parts.model._modules = {name: layers[name] for name in reversed(list(layers))}
    return parts


class PaddingSampler(Sampler):
    """Repeats the first samples until the ranks have equal shares."""

    def __init__(self, size: int, seed: int, plan: BatchPlan, ranks: int) -> None:
        super().__init__(-(-size // ranks) * ranks, seed, plan)
        self.real_size = size

    def order(self, epoch: int) -> Tensor:
        order = torch.randperm(self.real_size, generator=torch.Generator().manual_seed(self.seed + epoch))
        return torch.cat([order, order[: self.size - self.real_size]])


def sampler_that_pads(own: Own, trial: Trial, ranks: Ranks) -> Parts:
    parts = LOOP.start(own, trial, ranks)
    parts.sampler = PaddingSampler(len(parts.train_feed), trial.config.seed, parts.sampler.plan, ranks.size)
    return parts


def sampler_that_drops_the_last_batch(parts: Parts, begin: Position) -> Any:
    return (step for step in LOOP.steps(parts, begin) if step.size == step.workers * step.local_batch)


def augmentation_seeded_by_rank(own: Own, trial: Trial, ranks: Ranks) -> Parts:
    parts = LOOP.start(own, trial, ranks)
    parts.train_feed = Feed(
        parts.train_feed.source, train=True, seed=trial.config.seed + ranks.rank, dtype=torch.float64
    )
    return parts


def rate_not_scaled(parts: Parts, step: Step) -> float:
    rate = LOOP.learning_rate(parts, step) * parts.config.lr.base_batch / parts.config.batch
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    return rate


def warmup_counted_in_calls(parts: Parts, step: Step) -> float:
    """A scheduler called once a microbatch of this rank, which takes each call for a step."""
    calls = step.position.step * len(hosted_workers(step.workers, parts.ranks.rank, parts.ranks.size))
    epoch = calls * step.workers * step.local_batch / parts.sampler.size
    rate = parts.learning_rate(epoch, step.workers * step.local_batch)
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    return rate


def schedule_counted_in_steps(parts: Parts, step: Step) -> float:
    """Right on any number of ranks, until the batch changes."""
    batch = parts.config.batch
    rate = parts.learning_rate(step.position.step * batch / parts.sampler.size, batch)
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    return rate


def dropout_seeded_by_rank(parts: Parts, step: Step) -> float:
    def reseed(*_: object) -> None:
        torch.manual_seed(1000 * step.position.step + parts.ranks.rank)

    handle = parts.objective.register_forward_pre_hook(reseed)
    loss = LOOP.gradient(parts, step)
    handle.remove()
    return loss


def gradient_summed(parts: Parts, step: Step) -> float:
    loss = LOOP.gradient(parts, step)
    for parameter in parts.model.parameters():
        assert parameter.grad is not None
        parameter.grad *= parts.ranks.size
    return loss


def accumulation_that_divides_by_microbatches(parts: Parts, step: Step) -> float:
    """1 / (number of microbatches) for each, whatever its size; right while all are full."""
    forward = parts.objective.forward

    def wrong(inputs: Any, target: Any, weight: float) -> Tensor:
        return forward(inputs, target, parts.ranks.size / step.active if weight else 0.0)

    parts.objective.forward = wrong  # type: ignore[method-assign]
    loss = LOOP.gradient(parts, step)
    parts.objective.forward = forward  # type: ignore[method-assign]
    return loss


def mean_of_the_ranks_means(parts: Parts, step: Step) -> float:
    """Each rank averages its own samples, and DDP the ranks, though they have unequal shares."""
    forward = parts.objective.forward
    mine = len(LOOP.samples(parts, step))

    def wrong(inputs: Any, target: Any, weight: float) -> Tensor:
        return forward(inputs, target, len(target) / mine if weight else 0.0)

    parts.objective.forward = wrong  # type: ignore[method-assign]
    loss = LOOP.gradient(parts, step)
    parts.objective.forward = forward  # type: ignore[method-assign]
    return loss


def codec_that_drops_its_residual(config: ExchangeConfig) -> Exchange:
    return make_exchange(dataclasses.replace(config, error_feedback=False))


class RankZeroStatistics(WorkerStatistics):
    """What DDP's broadcast of buffers does: everybody takes rank 0's."""

    def synchronize(self, sum_over_ranks: Any) -> None:
        def keep_first(flat: Tensor) -> None:
            dist.broadcast(flat.mul_(dist.get_world_size()), src=0)

        super().synchronize(keep_first if dist.is_initialized() else sum_over_ranks)


def statistics_of_rank_0(own: Own, trial: Trial, ranks: Ranks) -> Parts:
    parts = LOOP.start(own, trial, ranks)
    parts.statistics = RankZeroStatistics(parts.model, parts.statistics.keep)
    return parts


def statistics_of_each_rank(parts: Parts) -> Any:
    """An evaluation that forgets to make the statistics common."""
    ranks, parts.ranks = parts.ranks, Ranks()
    evaluation = LOOP.evaluate(parts)
    parts.ranks = ranks
    return evaluation


class PaddedFeed(Feed):
    """Gives every rank as many evaluation batches as the others by handing some out twice."""

    ranks = 1

    def evaluation_batches(self, batch: int) -> list[Tensor]:
        batches = super().evaluation_batches(batch)
        return batches + batches[: -len(batches) % self.ranks]


def evaluation_with_duplicates(own: Own, trial: Trial, ranks: Ranks) -> Parts:
    parts = LOOP.start(own, trial, ranks)
    parts.test_feed = PaddedFeed(parts.test_feed.source, train=False, dtype=torch.float64)
    parts.test_feed.ranks = ranks.size
    return parts


def checkpoint_without_optimizer(parts: Parts, position: Position, folder: Path) -> None:
    state = capture(parts, position, 0.0)
    state["optimizer"]["state"] = {}
    if parts.ranks.first:
        save_checkpoint(folder, position.step, state, keep=1)


def checkpoint_that_begins_the_epoch_again(parts: Parts, position: Position, folder: Path) -> None:
    LOOP.save(parts, dataclasses.replace(position, offset=0), folder)


def checkpoint_without_residuals(parts: Parts, position: Position, folder: Path) -> None:
    state = capture(parts, position, 0.0)
    state["exchange"] = None
    if parts.ranks.first:
        save_checkpoint(folder, position.step, state, keep=1)


def planted(**piece: Any) -> Subject:
    """bigstep's loop with one piece replaced."""
    return dataclasses.replace(LOOP, **piece)
