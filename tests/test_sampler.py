"""Which worker sees what: properties that hold for every number of ranks."""

from __future__ import annotations

import pytest

from bigstep.data.sampler import Position, Sampler, Step, hosted_workers
from bigstep.engine.methods.forwards import forwards_of
from bigstep.schedules import BatchPlan, BatchStage


def sampler(size: int = 103, workers: int = 4, local_batch: int = 8, seed: int = 0) -> Sampler:
    return Sampler(size, seed, BatchPlan([BatchStage(0.0, workers, local_batch)]))


@pytest.mark.parametrize(
    ("size", "workers", "local_batch"), [(103, 4, 8), (64, 8, 8), (33, 7, 3), (5, 1, 2), (10, 5, 2)]
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_once_an_epoch_on_any_number_of_ranks(
    size: int, workers: int, local_batch: int, ranks: int
) -> None:
    if ranks > workers:
        ranks = workers
    source = sampler(size, workers, local_batch)
    seen = []
    for step in source.steps(epochs=1):
        for rank in range(ranks):
            for forward in forwards_of(step, hosted_workers(step.workers, rank, ranks), max_samples=local_batch * 2):
                seen += source.order(0)[forward.start : forward.stop].tolist()
    assert sorted(seen) == list(range(size))


def test_sample_order_does_not_depend_on_ranks() -> None:
    source = sampler(size=200, workers=7, local_batch=5)
    for step in source.steps(epochs=2):
        one = [(f.start, f.stop) for f in forwards_of(step, range(step.workers), 1)]
        three = [
            (f.start, f.stop) for rank in range(3) for f in forwards_of(step, hosted_workers(step.workers, rank, 3), 1)
        ]
        assert one == three


def test_worker_share_is_a_pure_function_of_seed_epoch_step_and_worker() -> None:
    first, second = sampler(seed=3), sampler(seed=3)
    list(first.steps(epochs=2))  # a history must not matter
    step = next(second.steps(epochs=5, begin=Position(epoch=4)))
    assert first.step_at(Position(epoch=4)) == step
    assert first.order(4).equal(second.order(4))
    assert not first.order(4).equal(first.order(3))
    assert not first.order(4).equal(sampler(seed=4).order(4))


def test_incomplete_batch_goes_to_few_workers_in_like_shares() -> None:
    step = Step(Position(), stop=70, workers=16, local_batch=32)
    sizes = [stop - start for start, stop in map(step.share, range(16))]
    assert sizes[:3] == [23, 23, 24]
    assert sizes[3:] == [0] * 13
    assert step.active == 3


def test_steps_resumed_in_the_middle_of_an_epoch_are_the_same_steps() -> None:
    source = sampler()
    steps = list(source.steps(epochs=3))
    for index in (1, 5, len(steps) - 1):
        assert list(source.steps(epochs=3, begin=steps[index].position)) == steps[index:]


def test_batch_plan_changes_the_batch_at_its_epoch_and_keeps_every_sample() -> None:
    plan = BatchPlan([BatchStage(0.0, 2, 4), BatchStage(1.0, 4, 8)])
    steps = list(Sampler(64, 0, plan).steps(epochs=2))
    assert [step.size for step in steps] == [8] * 8 + [32] * 2


def test_fraction_of_an_epoch_ends_at_the_step_that_completes_it() -> None:
    assert sampler(size=100, workers=1, local_batch=10).total_steps(0.25) == 3


def test_hosting_is_contiguous_and_differs_by_one_at_most() -> None:
    for workers in (1, 7, 8, 2048):
        for ranks in (1, 2, 3, 4, 7):
            blocks = [hosted_workers(workers, rank, ranks) for rank in range(ranks)]
            assert [worker for block in blocks for worker in block] == list(range(workers))
            sizes = [len(block) for block in blocks]
            assert max(sizes) - min(sizes) <= 1


def test_joined_workers_have_one_size_and_stay_within_the_bound() -> None:
    step = Step(Position(), stop=103, workers=10, local_batch=11)
    forwards = forwards_of(step, range(step.workers), max_samples=30)
    assert sum(forward.workers for forward in forwards) == step.active
    for forward in forwards:
        shares = {
            stop - start
            for start, stop in map(step.share, range(forward.first_worker, forward.first_worker + forward.workers))
        }
        assert len(shares) == 1
        assert forward.size <= 30
