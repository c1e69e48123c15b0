"""Runs take over the process groups of those before them; ranks that disagree on what they hold begin anew."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bigstep.config import ExchangeConfig, IslandsConfig, Stage, WorkersConfig
from bigstep.exchange.groups import lending, made
from bigstep.exchange.world import World as Members
from test_same_path import small_order, train_here
from worlds import World

PLAIN = dataclasses.replace(small_order(4), epochs=1)  # seven steps on eighty images
KINDS = {
    "crews": dataclasses.replace(
        PLAIN, workers=WorkersConfig(count=2, local_batch=6), plan=(Stage(epoch=0.5, count=4, local_batch=3),)
    ),
    "torus": dataclasses.replace(PLAIN, exchange=ExchangeConfig(collective="torus", grid=(2, 2))),
    "islands": dataclasses.replace(PLAIN, islands=IslandsConfig(count=2, every=2)),
}


def threads_and_groups(kinds: list[str], folder: str) -> list[tuple[int, int, str]]:
    """Train one after another; after each, this rank's threads, the groups that it has made, and the weights."""
    seen: list[tuple[int, int, str]] = []
    for kind in kinds:
        sha = train_here(KINDS[kind], str(Path(folder, str(len(seen)))))["sha"]
        seen.append((len(os.listdir("/proc/self/task")), made(), sha))
    return seen


def test_runs_one_after_another_keep_the_number_of_threads_level(world: Callable[[int], World], tmp_path: Path) -> None:
    kinds = list(KINDS)
    for seen in world(4).run(threads_and_groups, kinds * 3, str(tmp_path), timeout=100):
        threads, groups, weights = (list(each) for each in zip(*seen, strict=True))
        once, twice = len(kinds), 2 * len(kinds)  # in the second round ranks make up for groups that others have made
        assert groups[twice:] == [groups[twice - 1]] * once, "a run made groups that one before it had left"
        # those of autograd, and of a writer that is about to end
        assert max(threads[twice:]) <= threads[twice - 1] + 2
        assert weights == weights[:once] * 3, "a group that was taken over changes the sums"


def joined(timeout_s: float = 20.0) -> Members:
    group = dist.group.WORLD
    assert group is not None
    return Members.join(group, timeout=timedelta(seconds=timeout_s), purpose="a test")


def total(group: dist.ProcessGroup) -> float:
    one = torch.ones(())
    dist.all_reduce(one, group=group)
    return float(one)


def worlds_at_once() -> tuple[bool, bool, bool]:
    """Whether two worlds of one run share a group, whether the next run takes them over, and with another timeout."""
    with lending():
        first, second = joined(), joined()
        groups = [each.new_group(each.everyone()) for each in (first, second, first)]
    shared = len(set(groups)) < 3
    with lending():
        again = [each.new_group(each.everyone()) for each in (joined(), joined())]
        taken = all(group in groups for group in again) and len(set(again)) == 2
        other = joined(30.0).new_group([0, 1]) in groups
        assert [total(group) for group in again] == [2.0, 2.0]
    return shared, taken, other


def test_worlds_that_live_at_once_have_groups_of_their_own(world: Callable[[int], World]) -> None:
    assert world(2).run(worlds_at_once) == [(False, True, False)] * 2


def run_once(timeout_s: float, *, fails: bool) -> tuple[int, float]:
    """How many groups a run makes, and what they sum."""
    before = made()
    with lending():
        members = joined(timeout_s)
        value = total(members.new_group(members.everyone()))
        if fails:
            raise ZeroDivisionError
    return made() - before, value


def after_a_failure(alone: bool) -> list[tuple[int, float]]:
    """The runs behind one that failed, on one rank or on both."""
    timeout_s = 21.0 + alone  # so that no other test has left groups like these
    run_once(timeout_s, fails=False)
    with contextlib.suppress(ZeroDivisionError):
        run_once(timeout_s, fails=dist.get_rank() == 1 or not alone)
    return [run_once(timeout_s, fails=False) for _ in range(2)]


def test_what_a_failed_run_had_is_not_taken_over(world: Callable[[int], World]) -> None:
    for alone in (True, False):
        assert world(2).run(after_a_failure, alone) == [[(1, 2.0), (0, 2.0)]] * 2


def bound_to_a_device() -> tuple[list[str], float, list[torch.device | None]]:
    """Let the first rank alone make a group of itself while the default group is bound to a GPU, as NCCL's is.

    Returns:
        What torch would have split (which waits for all ranks, and here one calls), what the group sums, and the
        devices that it and the default group are bound to.
    """
    default, torchs = dist.group.WORLD, dist.distributed_c10d
    assert default is not None
    members, asked, find = joined(23.0), list[str](), torchs._get_split_source

    def found(group: dist.ProcessGroup) -> object:
        asked.append(group.group_name)
        return find(group)

    torchs._get_split_source, default.bound_device_id = found, torch.device("cuda", 0)
    try:
        if dist.get_rank() == 1:
            return asked, 1.0, [None, default.bound_device_id]
        group = members.new_group([0])
        return asked, total(group), [group.bound_device_id, default.bound_device_id]
    finally:
        torchs._get_split_source, default.bound_device_id = find, None


def test_a_group_is_made_by_its_members_alone_where_gpus_are_bound(world: Callable[[int], World]) -> None:
    assert world(2).run(bound_to_a_device) == [([], 1.0, [None, torch.device("cuda", 0)])] * 2
