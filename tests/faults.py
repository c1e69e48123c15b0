"""Faults that people have really made, each planted in one piece of the real run: its data, method, loop or state.

Every function here is what a run with that fault would do; nothing else about it changes. They lie in a module of their
own because rank processes import them by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bigstep.check import Own, Subject, Trial, bigstep_loop
from bigstep.config import ExchangeConfig
from bigstep.data.feed import Feed
from bigstep.data.sampler import Position, Sampler, Step, hosted_workers
from bigstep.engine import build as engine
from bigstep.engine.build import Run
from bigstep.engine.methods.parallel import make_exchange
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.ranks import Ranks
from bigstep.engine.rates import Rates
from bigstep.exchange import Exchange
from bigstep.norm import WorkerStatistics

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


@contextlib.contextmanager
def instead(place: Any, name: str, value: Any) -> Iterator[None]:
    """Plant something into a module or class while a run is built."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def method_of(run: Run) -> Synchronous:
    assert isinstance(run.method, Synchronous)
    return run.method


# ---- start


def different_seeds_per_rank(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    torch.manual_seed(trial.config.seed + ranks.rank)
    for module in run.learner.model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return run


def one_rank_with_another_order(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    if ranks.rank == 1:
        layers = run.learner.model._modules
        run.learner.model._modules = {name: layers[name] for name in reversed(list(layers))}
    return run


# ---- samples


class PaddingSampler(Sampler):
    """Repeats the first samples until the ranks have equal shares."""

    def __init__(self, size: int, *arguments: Any) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        super().__init__(-(-size // ranks) * ranks, *arguments)
        self.real_size = size

    def order(self, epoch: int) -> Tensor:
        order = torch.randperm(self.real_size, generator=torch.Generator().manual_seed(self.seed + epoch))
        return torch.cat([order, order[: self.size - self.real_size]])


def sampler_that_pads(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(engine, "Sampler", PaddingSampler):
        return LOOP.start(own, trial, ranks)


class LateSampler(Sampler):
    """Gives one sample twice from the fourth epoch on."""

    def order(self, epoch: int) -> Tensor:
        order = super().order(epoch).clone()
        if epoch >= 3:
            order[0] = order[1]
        return order


def sampler_that_fails_late(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(engine, "Sampler", LateSampler):
        return LOOP.start(own, trial, ranks)


class SameSampler(Sampler):
    """Forgets to tell the shuffle which epoch it is."""

    def order(self, epoch: int) -> Tensor:
        return super().order(0)


def sampler_with_one_order(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(engine, "Sampler", SameSampler):
        return LOOP.start(own, trial, ranks)


def sampler_that_drops_the_last_batch(run: Run, begin: Position) -> Any:
    return (step for step in LOOP.steps(run, begin) if step.size == step.workers * step.local_batch)


def worker_0_counted_twice_on_3_ranks(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    if ranks.size == 3:
        method = method_of(run)

        def hosted(step: Step) -> list[int]:
            mine = list(hosted_workers(step.workers, ranks.rank, ranks.size))
            return [0, *mine] if ranks.rank == 2 else mine

        method.forwards = dataclasses.replace(method.forwards, hosted=hosted)
    return run


def augmentation_seeded_by_rank(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    seed = trial.config.seed + ranks.rank
    return dataclasses.replace(run, train_feed=Feed(run.train_feed.source, train=True, seed=seed, dtype=torch.float64))


def steps_that_end_early_on_rank_1(run: Run, begin: Position) -> Iterator[Step]:
    """A loader of each rank's own: rank 1 has no samples for the last step."""
    ends = run.ranks.rank == 1
    return (step for step in LOOP.steps(run, begin) if not (ends and step.stop == run.sampler.size))


# ---- rate


def with_rate(run: Run, rate: Any) -> Run:
    """A run whose rate of a step is rate(run, step)."""

    class Wrong(Rates):
        def set(self, step: Step) -> float:
            value = float(rate(run, step))
            for group in run.learner.optimizer.param_groups:
                group["lr"] = value
            return value

    return dataclasses.replace(run, rates=Wrong(**vars(run.rates)))


def rate_not_scaled(own: Own, trial: Trial, ranks: Ranks) -> Run:
    def rate(run: Run, step: Step) -> float:
        return run.rates.set(step) * run.config.lr.base_batch / run.config.batch

    return with_rate(LOOP.start(own, trial, ranks), rate)


def warmup_counted_in_calls(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """A scheduler called once a microbatch of this rank, which takes each call for a step."""

    def rate(run: Run, step: Step) -> float:
        calls = step.position.step * len(hosted_workers(step.workers, ranks.rank, ranks.size))
        epoch = calls * step.workers * step.local_batch / run.sampler.size
        return run.rates.learning_rate(epoch, step.workers * step.local_batch)

    return with_rate(LOOP.start(own, trial, ranks), rate)


def schedule_counted_in_steps(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """Right on any number of ranks, until the batch changes."""

    def rate(run: Run, step: Step) -> float:
        batch = run.config.batch
        return run.rates.learning_rate(step.position.step * batch / run.sampler.size, batch)

    return with_rate(LOOP.start(own, trial, ranks), rate)


def rate_that_begins_again_after_a_resume(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """The schedule counts the steps of this process."""
    seen: list[int] = []

    def rate(run: Run, step: Step) -> float:
        if not seen:
            seen.append(step.position.step if run.state.position.step else 0)
        early = max(0, step.position.step - seen[0])
        epoch = run.sampler.epochs_at(step.position) * (early / step.position.step if step.position.step else 1.0)
        return run.rates.learning_rate(epoch, step.workers * step.local_batch)

    return with_rate(LOOP.start(own, trial, ranks), rate)


# ---- gradient


def dropout_seeded_by_rank(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)

    def reseed(*_: object) -> None:
        torch.manual_seed(1000 + ranks.rank)

    run.learner.objective.register_forward_pre_hook(reseed)
    return run


def gradient_summed(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    method = method_of(run)
    accumulate = method.accumulate

    def wrong(step: Step, batches: Any) -> Any:
        gathered = accumulate(step, batches)
        for parameter in run.learner.trained:
            assert parameter.grad is not None
            parameter.grad *= ranks.size
        return gathered

    method.accumulate = wrong  # type: ignore[method-assign]
    return run


def _weigh(run: Run, weight: Any) -> Run:
    """A run whose forwards count weight(step, forward)."""
    method = method_of(run)

    class Wrong(type(method.forwards)):  # type: ignore[misc]
        def weights(self, step: Step, forwards: Sequence[Any]) -> list[float]:
            return [float(weight(step, forward)) for forward in forwards]

    method.forwards = Wrong(**vars(method.forwards))
    return run


def accumulation_that_divides_by_microbatches(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """1 / (number of microbatches) for each, whatever its size; right while all are full."""
    return _weigh(LOOP.start(own, trial, ranks), lambda step, forward: 1 / step.active)


def mean_of_the_ranks_means(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """Each rank averages its own samples, and DDP the ranks, though they have unequal shares."""
    run = LOOP.start(own, trial, ranks)

    def weight(step: Step, forward: Any) -> float:
        return forward.size / len(LOOP.samples(run, step)) / ranks.size

    return _weigh(run, weight)


def clipping_before_the_exchange(own: Own, trial: Trial, ranks: Ranks) -> Run:
    """Each rank clips its own gradient, as code does that clips inside a hook."""
    run = LOOP.start(own, trial, ranks)

    def clip(gradient: Tensor) -> Tensor:
        return gradient * min(1.0, 0.02 / max(float(gradient.norm()), 1e-12))

    for parameter in run.learner.trained:
        parameter.register_hook(clip)
    return run


def codec_that_drops_its_residual(config: ExchangeConfig) -> Exchange:
    return make_exchange(dataclasses.replace(config, error_feedback=False))


# ---- statistics and evaluation


class RankZeroStatistics(WorkerStatistics):
    """What DDP's broadcast of buffers does: everybody takes rank 0's."""

    def synchronize(self, sum_over_ranks: Any) -> None:
        def keep_first(flat: Tensor) -> None:
            dist.broadcast(flat.mul_(dist.get_world_size()), src=0)

        super().synchronize(keep_first if dist.is_initialized() else sum_over_ranks)


def statistics_of_rank_0(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(engine, "WorkerStatistics", RankZeroStatistics):
        return LOOP.start(own, trial, ranks)


class OwnStatistics(WorkerStatistics):
    """An evaluation that forgets to make the statistics common."""

    def synchronize(self, sum_over_ranks: Any) -> None:
        super().synchronize(lambda flat: None)


def statistics_of_each_rank(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(engine, "WorkerStatistics", OwnStatistics):
        return LOOP.start(own, trial, ranks)


class PaddedFeed(Feed):
    """Gives every rank as many evaluation batches as the others by handing some out twice."""

    def evaluation_batches(self, batch: int) -> list[Tensor]:
        batches = super().evaluation_batches(batch)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return batches + batches[: -len(batches) % ranks]


def evaluation_with_duplicates(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    padded = PaddedFeed(run.evaluator.feed.source, train=False, dtype=torch.float64)
    return dataclasses.replace(run, evaluator=dataclasses.replace(run.evaluator, feed=padded))


# ---- what is saved and resumed


def _forget(run: Run, name: str, value: Any) -> Run:
    """A run whose checkpoints lack a part."""
    capture = run.state.capture
    run.state.capture = lambda: {**capture(), name: value}  # type: ignore[method-assign]
    return run


def checkpoint_without_optimizer(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    groups = run.learner.optimizer.state_dict()["param_groups"]
    return _forget(run, "optimizer", {"state": {}, "param_groups": groups})


def checkpoint_without_residuals(own: Own, trial: Trial, ranks: Ranks) -> Run:
    return _forget(LOOP.start(own, trial, ranks), "exchange", None)


def checkpoint_that_begins_the_epoch_again(own: Own, trial: Trial, ranks: Ranks) -> Run:
    run = LOOP.start(own, trial, ranks)
    capture = run.state.capture

    def wrong() -> dict[str, Any]:
        saved = capture()
        return {**saved, "position": {**saved["position"], "offset": 0}}

    run.state.capture = wrong  # type: ignore[method-assign]
    return run


class TwiceStatistics(WorkerStatistics):
    """After a resume every rank takes the whole average for its share."""

    def load_state_dict(self, states: Any, rank: int = 0, ranks: int = 1) -> None:
        super().load_state_dict(states, 0, 1)


def statistics_that_every_rank_takes_whole(own: Own, trial: Trial, ranks: Ranks) -> Run:
    with instead(engine, "WorkerStatistics", TwiceStatistics):
        return LOOP.start(own, trial, ranks)


def planted(**piece: Any) -> Subject:
    """bigstep's loop with one piece replaced."""
    return dataclasses.replace(LOOP, **piece)
