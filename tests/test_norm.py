"""Batch-norm statistics: the mean over workers whatever the ranks, the last batch alone, gamma = 0."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from bigstep.errors import ConfigError
from bigstep.norm import WorkerStatistics, average_statistics, ghost_batch_norm, last_batch_statistics, zero_gamma
from bigstep.norm import set_workers as set_ghost_workers

WORKERS, LOCAL_BATCH, CHANNELS = 6, 5, 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.BatchNorm2d(CHANNELS), nn.Conv2d(CHANNELS, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)]
    return nn.Sequential(*layers).double()


def batch_of(step: int, worker: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    shape = (LOCAL_BATCH, CHANNELS, 2, 2)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + worker) + step


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "running" in name}


class Rank:
    """One rank of a simulated run: some of the workers, a model and its statistics."""

    def __init__(self, workers: list[int], keep: float) -> None:
        self.workers, self.model = workers, network()
        self.statistics = WorkerStatistics(self.model, keep)

    def step(self, step: int, active: int) -> None:
        mine = [worker for worker in self.workers if worker < active]
        for seen, worker in enumerate(mine):
            self.statistics.begin_forward(seen, 1)
            self.model(batch_of(step, worker))
        self.statistics.end_step(len(mine) / active)


def synchronize(ranks: list[Rank]) -> None:
    total = sum(rank.statistics.state_dict()["share"] for rank in ranks)
    for rank in ranks:
        rank.statistics.synchronize(lambda flat: flat.copy_(total))


def simulate(division: list[list[int]], keep: float, syncs: tuple[int, ...] = (8,)) -> dict[str, Tensor]:
    """Eight steps on ranks that host the workers of `division`; fewer workers are active in the first half."""
    ranks = [Rank(workers, keep) for workers in division]
    for step in range(8):
        for rank in ranks:
            rank.step(step, active=3 if step < 4 else WORKERS)
        if step + 1 in syncs:
            synchronize(ranks)
    ends = [buffers_of(rank.model) for rank in ranks]
    assert all(torch.equal(end[name], ends[0][name]) for end in ends for name in end), "ranks must end bit-identical"
    return ends[0]


def reference(keep: float) -> dict[str, Tensor]:
    """From the definition: statistics of each worker's batch, their mean, their moving average."""
    model = network()
    averages = buffers_of(model)
    for step in range(8):
        active = range(3 if step < 4 else WORKERS)
        local = []
        for worker in active:
            x = batch_of(step, worker)
            inner = model[1](model[0](x)).relu()
            local.append({f"{name}.running_{kind}": value for name, y in (("0", x), ("3", inner))
                          for kind, value in (("mean", y.mean((0, 2, 3))), ("var", y.var((0, 2, 3))))})  # fmt: skip
        for name in averages:
            mean = torch.stack([statistics[name].detach() for statistics in local]).mean(0)
            averages[name] = keep * averages[name] + (1 - keep) * mean
    return averages


DIVISIONS = {
    "one rank": [[0, 1, 2, 3, 4, 5]],
    "two ranks": [[0, 1, 2], [3, 4, 5]],  # the second is idle while three workers are active
    "three uneven ranks": [[0, 3], [1], [2, 4, 5]],
}


@pytest.mark.parametrize("keep", [0.9, 0.0])
@pytest.mark.parametrize("division", DIVISIONS)
def test_evaluation_statistics_are_the_mean_over_workers_on_any_number_of_ranks(division: str, keep: float) -> None:
    result = simulate(DIVISIONS[division], keep)
    torch.testing.assert_close(result, reference(keep), rtol=1e-12, atol=1e-12)  # float64, order of sums


def test_when_the_ranks_synchronize_does_not_change_one_bit_of_the_statistics() -> None:
    once, often = (simulate(DIVISIONS["two ranks"], 0.9, syncs) for syncs in ((8,), (1, 2, 5, 8)))
    assert all(torch.equal(once[name], often[name]) for name in once)


def test_without_memory_the_statistics_are_exactly_those_of_the_last_step() -> None:
    rank = Rank([0], keep=0.0)
    for step in range(3):
        rank.step(step, active=1)
    synchronize([rank])
    plain = network()
    last_batch_statistics(plain)
    plain(batch_of(2, 0))
    assert buffers_of(rank.model).keys() == buffers_of(plain).keys()
    assert all(torch.equal(value, buffers_of(plain)[name]) for name, value in buffers_of(rank.model).items())


def test_several_workers_in_one_forward_count_like_one_after_another() -> None:
    one_by_one, together = Rank(list(range(WORKERS)), 0.9), Rank(list(range(WORKERS)), 0.9)
    ghost_batch_norm(together.model, 1)
    for step in range(3):
        one_by_one.step(step, WORKERS)
        seen = 0
        for now in (1, 3, 2):
            together.statistics.begin_forward(seen, now)
            set_ghost_workers(together.model, now)
            together.model(torch.cat([batch_of(step, worker) for worker in range(seen, seen + now)]))
            seen += now
        together.statistics.end_step(1.0)
    for rank in (one_by_one, together):
        synchronize([rank])
    torch.testing.assert_close(buffers_of(one_by_one.model), buffers_of(together.model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keep", [0.9, 0.0])
def test_a_resumed_run_ends_with_the_same_bits(keep: float) -> None:
    rank = Rank([0, 1], keep)
    for step in range(3):
        rank.step(step, active=2)
    file = io.BytesIO()
    torch.save((rank.statistics.state_dict(), rank.model.state_dict()), file)
    file.seek(0)
    statistics, weights = torch.load(file, weights_only=True)
    resumed = Rank([0, 1], keep)
    resumed.model.load_state_dict(weights)
    resumed.statistics.load_state_dict([statistics])
    for other in (rank, resumed):
        for step in range(3, 6):
            other.step(step, active=2)
        synchronize([other])
    one, two = buffers_of(rank.model), buffers_of(resumed.model)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_step_that_is_not_ended_leaves_no_trace() -> None:
    rank, clean = Rank([0, 1], 0.9), Rank([0, 1], 0.9)
    rank.statistics.begin_forward(0, 1)
    rank.model(batch_of(7, 5) * torch.nan)  # an overflow, for which the loop skips the step
    for other in (rank, clean):
        other.step(0, active=2)
        synchronize([other])
    one, two = buffers_of(rank.model), buffers_of(clean.model)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_of_two_ranks_goes_on_with_another_number(ranks: int) -> None:
    before = [Rank([0, 1], 0.9), Rank([2, 3], 0.9)]
    after = [Rank(list(range(WORKERS))[rank::ranks], 0.9) for rank in range(ranks)]
    for step in range(4):
        for rank in before:
            rank.step(step, active=4)
    states = [rank.statistics.state_dict() for rank in before]
    for number, rank in enumerate(after):
        rank.statistics.load_state_dict(states, number, ranks)
    synchronize(before)
    synchronize(after)
    torch.testing.assert_close(buffers_of(after[0].model), buffers_of(before[0].model), rtol=1e-12, atol=1e-12)


def test_statistics_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="14 batch-norm statistics, but this model has 6"):
        WorkerStatistics(nn.BatchNorm2d(3), 0.9).load_state_dict([WorkerStatistics(network(), 0.9).state_dict()])


def test_a_model_without_batch_norm_needs_no_communication() -> None:
    def forbidden(flat: Tensor) -> None:
        raise AssertionError("nothing to sum")

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    statistics = WorkerStatistics(model, 0.9)
    for _ in range(2):
        statistics.begin_forward(0, 1)
        model(torch.randn(4, 2))
        statistics.end_step(1.0)
        statistics.synchronize(forbidden)
    statistics.load_state_dict([statistics.state_dict()])
    average_statistics(model, forbidden, ranks=2)


def test_averaging_over_ranks_is_the_mean_of_their_statistics() -> None:
    models = [network() for _ in range(3)]
    for worker, model in enumerate(models):
        assert last_batch_statistics(model) == 2
        model(batch_of(0, worker))
    before = [buffers_of(model) for model in models]
    total = sum(torch.cat([value for kind in ("mean", "var") for name, value in buffers.items() if kind in name])
                for buffers in before)  # fmt: skip
    for model in models:
        average_statistics(model, lambda flat: flat.copy_(total), ranks=3)
    for name, value in buffers_of(models[0]).items():
        torch.testing.assert_close(value, torch.stack([buffers[name] for buffers in before]).mean(0))


class Block(nn.Module):
    def __init__(self, norms: int, residual: bool) -> None:
        super().__init__()
        for index in range(1, norms + 1):
            self.add_module(f"bn{index}", nn.BatchNorm2d(4))
        if residual:
            self.downsample = None


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    @property
    def last_norm(self) -> nn.Module:
        return self.bn1


def zeroed(model: nn.Module) -> list[str]:
    return [name for name, value in model.named_parameters() if name.endswith("weight") and not value.any()]


def test_gamma_is_zero_in_the_last_norm_of_residual_branches_and_nowhere_else() -> None:
    model = nn.Sequential(Block(2, True), Block(3, True), Block(2, False), Named())
    assert zero_gamma(model) == 3
    assert zeroed(model) == ["0.bn2.weight", "1.bn3.weight", "3.bn1.weight"]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvision_models_are_recognised(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    model = getattr(models, name)()
    assert zero_gamma(model) == {"resnet18": 8, "resnet50": 16}[name]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_timm_models_are_recognised(name: str) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, zero_init_last=False)
    assert zero_gamma(model) == {"resnet18": 8, "resnet50": 16}[name]


def test_moving_averages_of_workers_average_to_the_moving_average_of_workers() -> None:
    """The linearity that lets a rank keep one set of statistics for all its workers."""
    own = [copy.deepcopy(network()) for _ in range(WORKERS)]
    for step in range(8):
        for worker, model in enumerate(own):
            model(batch_of(step, worker))  # torch's momentum 0.1 keeps 0.9
    rank = Rank(list(range(WORKERS)), 0.9)
    for step in range(8):
        rank.step(step, WORKERS)
    synchronize([rank])
    for name, value in buffers_of(rank.model).items():
        mean = torch.stack([buffers_of(model)[name] for model in own]).mean(0)
        torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-12)
