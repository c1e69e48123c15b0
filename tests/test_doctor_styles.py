"""Right programs in other styles than the gallery's are not accused, and mistakes that it does not hold are seen.

Each case is a handful of facts as the observers write them; the last test runs a program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bigstep.doctor import examine
from bigstep.doctor.examination import Examination, diagnose
from bigstep.doctor.facts import (
    Backward,
    Batch,
    Collective,
    End,
    Event,
    Forward,
    Group,
    Held,
    Loader,
    Loss,
    Pass,
    Schedule,
    Start,
    Update,
    Weights,
)
from bigstep.doctor.finding import Case
from bigstep.doctor.launch import Limits, run_world
from bigstep.doctor.observe import clock
from bigstep.doctor.observe.clock import now
from bigstep.doctor.settings import Settings
from bigstep.doctor.world import Process, World


def world(make: Callable[[int], list[Event]], size: int, ended: str = "stopped") -> World:
    ranks = [Process([Group(rank=rank, world=size), *make(rank)], rank, size) for rank in range(size)]
    return World(ranks, ended=ended, started=size)


def judge(make: Callable[[int, int], list[Event]], *, ended: str = "stopped") -> Examination:
    """What is said of a program, given the facts of a rank by rank and number of ranks."""
    worlds = [world(lambda rank, size=size: make(rank, size), size, ended) for size in (1, 2)]
    return diagnose(Case(one=worlds[0], many=worlds[1]), "train.py", runs=worlds)


def faults(make: Callable[[int, int], list[Event]], **about: str) -> list[str]:
    return [finding.name for finding in judge(make, **about).faults]


def update(number: int = 0, *, used: float = 1.0, local: float = 1.0, norm: float = 1.0, micro: int = 1) -> Update:
    return Update(
        optimizer="SGD", number=number, rates=(0.1,), base=0.1, samples=32, norms=(norm,), used=used, local=local,
        names=("weight",), after=f"after {number}", micro_steps=micro,
    )  # fmt: skip


def forward(rank: int, samples: int = 32, loader: int = -1) -> Forward:
    rows = tuple(f"{rank} {index}" for index in range(4))
    return Forward(module="Net", training=True, route="plain", samples=samples, rows=rows, loader=loader)


def exchange(target: str) -> list[Event]:
    return [
        Collective(operation="all_reduce", target=target, values=8, reduce="SUM", done=done) for done in (False, True)
    ]


@pytest.mark.parametrize("with_criterion", [True, False])
def test_a_sum_of_losses_over_the_global_batch_may_be_summed_over_ranks(with_criterion: bool) -> None:
    def facts(rank: int, size: int, batch: int = 64) -> list[Event]:
        own = batch // size
        loss: list[Event] = [Loss(reduction="sum", targets=own)] if with_criterion else []
        grown = Backward(value=1.0, factor=1 / 64, summed=not with_criterion)
        return [forward(rank, own), *loss, grown, *exchange("gradient"), update(used=float(size), local=1.0)]

    assert faults(facts) == []
    # the control: with the whole batch on every rank the same exchange counts each sample as often as there are ranks
    assert faults(lambda rank, size: facts(rank, size, 64 * size)) == ["scaled-gradients"]


@pytest.mark.parametrize("ranks_apply", [0.5, 1.0])
def test_gradients_of_micro_batches_may_be_divided_themselves(ranks_apply: float) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        micro: list[Event] = [Batch(loader=0, number=0), forward(rank, loader=0), Backward(value=1.0)]
        return [event for number in range(3) for event in (*micro, *micro, update(number, used=ranks_apply, micro=2))]

    assert faults(facts) == ([] if ranks_apply == 0.5 else ["undivided-accumulation"])


@pytest.mark.parametrize("loaders", [(0, 1), (0, 0)])
def test_a_loss_for_each_of_two_data_sets_is_no_accumulation(loaders: tuple[int, int]) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        parts: list[Event] = []
        for loader in loaders:
            parts += [Batch(loader=loader, number=0), forward(rank, loader=loader), Backward(value=1.0)]
        return [event for number in range(3) for event in (*parts, update(number, micro=2))]

    assert faults(facts) == ([] if loaders == (0, 1) else ["undivided-accumulation"])


@pytest.mark.parametrize("target", ["parameter", "other"])
def test_weights_that_are_averaged_now_and_then_are_local_sgd(target: str) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        steps: list[Event] = [Weights(parameters="same")]
        for number in range(3):
            steps += [forward(rank), Backward(value=1.0), update(number, norm=1.0 + rank)]
        return [*steps, *exchange(target)]

    result = judge(facts)
    assert "unexchanged-gradients" in {finding.name for finding in result.findings}
    assert [f.name for f in result.faults] == ([] if target == "parameter" else ["unexchanged-gradients"])


@pytest.mark.parametrize("ended, expected", [("late", []), ("hung", ["waiting-ranks"])])
def test_a_slow_program_is_not_said_to_hang(ended: str, expected: list[str]) -> None:
    result = judge(lambda rank, size: [forward(rank), Backward(value=1.0), update()], ended=ended)
    assert [finding.name for finding in result.faults] == expected
    assert not result.healthy
    assert ("--timeout" in result.trouble) == (ended == "late")


def test_two_optimizers_with_a_scheduler_each_keep_to_one_schedule() -> None:
    def facts(rank: int, size: int) -> list[Event]:
        told: list[Event] = [Loader(loader=0, dataset="Set", samples=512, drawn=512 // size, batch=32 // size)]
        for epoch in range(3):
            told.append(Pass(loader=0, number=epoch, sampler_epoch=epoch))
            for step in range(16):
                number = 16 * epoch + step
                told += [Batch(loader=0, number=epoch, rows=(f"{rank} {number} a", f"{rank} {number} b")),
                         forward(rank, 32 // size, loader=0), Backward(value=1.0)]  # fmt: skip
                told += [update(2 * number), update(2 * number + 1, micro=0)]
                told += [Schedule(scheduler="CosineAnnealingLR", position=number + 1, horizon=48)] * 2
        return told

    found = {finding.name for finding in judge(facts, ended="finished").findings}
    assert "misplaced-schedule" not in found


def test_the_same_share_on_every_rank_is_found() -> None:
    """As of DistributedSampler(dataset, num_replicas=world, rank=0)."""

    def facts(rank: int, size: int, owner: Callable[[int], int] = lambda rank: 0) -> list[Event]:
        told: list[Event] = [Loader(loader=0, dataset="Set", samples=512, drawn=512 // size, batch=2)]
        for step in range(4):
            mine = tuple(2 * size * step + size * i + owner(rank) for i in range(2))
            told += [Batch(loader=0, number=0, indices=mine, rows=tuple(map(str, mine))), forward(rank, 2, loader=0)]
        return told

    assert faults(facts) == ["same-samples"]
    assert faults(lambda rank, size: facts(rank, size, lambda rank: rank)) == []


def test_shares_that_overlap_are_found() -> None:
    def facts(rank: int, size: int, shift: int = 4) -> list[Event]:
        mine = list(range(rank * shift, rank * shift + 32 // size))
        told: list[Event] = [
            Loader(loader=0, dataset="Subset", samples=len(mine), drawn=len(mine), batch=16, sampler="RandomSampler"),
            Batch(loader=0, number=0, indices=tuple(mine), rows=tuple(map(str, mine))),
            forward(rank, 16, loader=0),
        ]
        return [*told, Held(loader=0, rows=tuple(f"#{index}" for index in mine))]

    assert faults(facts) == ["overlapping-shares"]
    assert faults(lambda rank, size: facts(rank, size, 16)) == []


def test_a_step_on_one_rank_only_is_found() -> None:
    def facts(rank: int, size: int) -> list[Event]:
        start: list[Event] = [Weights(parameters="same")]
        steps: list[Event] = [forward(rank), Backward(value=1.0)]
        return start + [event for n in range(3) for event in (*steps, *([update(n)] if rank == 0 else []))]

    assert faults(facts) == ["drifting-weights"]


def test_the_rank_that_failed_is_heard_and_not_those_that_lost_it(tmp_path: Path) -> None:
    """And a rank that notices that another was stopped by the examination has not failed."""

    def run(*ends: tuple[str, str]) -> World:
        facts = tmp_path / f"facts {len(list(tmp_path.iterdir()))}"
        facts.mkdir()
        lines = "".join(
            f"open({str(facts)!r} + '/{rank}.jsonl', 'w').write({_lines(rank, *end)!r})\n"
            for rank, end in enumerate(ends)
        )
        script = tmp_path / "train.py"
        script.write_text(f"{lines}import os\nos._exit(1)\n")
        settings = Settings(
            facts=str(facts), root=str(tmp_path), original=str(tmp_path), own=str(tmp_path), steps=2, ranks=1
        )
        return run_world([str(script)], settings, tmp_path, Limits(total_s=20), gpus=False)

    lost = "RuntimeError: Connection closed by peer [127.0.0.1]:5"
    assert run(("failed", lost), ("failed", "KeyError: 'label'")).message == "KeyError: 'label'"
    assert run(("stopped", ""), ("failed", lost)).ended == "stopped"
    assert run(("failed", lost), ("failed", lost)).message == lost


def _lines(rank: int, reason: str, message: str) -> str:
    events: Sequence[Event] = (
        Start(pid=rank, rank=rank, world=2), Group(rank=rank, world=2), End(reason=reason, message=message),
    )  # fmt: skip
    return "\n".join(event.to_json() for event in events) + "\n"


def test_the_clock_bears_threads_that_come_and_go() -> None:
    """Their names are given again to later ones, and what the system counted for the first is gone."""
    failures: list[BaseException] = []

    def look() -> None:
        try:
            assert now() <= now()
        except BaseException as error:
            failures.append(error)

    for _ in range(50):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert not failures


def test_a_wait_between_the_two_readings_of_the_clock_is_not_taken_from_the_time_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that loses its core there has waited longer, by the counter, than the seconds it has read know of."""
    seconds, waited = 10.0, 0

    def loses_its_core_once() -> float:
        nonlocal seconds, waited
        read = seconds
        if not waited:
            seconds, waited = seconds + 1.0, 10**9
        return read

    monkeypatch.setattr(clock.time, "perf_counter", loses_its_core_once)
    monkeypatch.setattr(clock._Counter, "waited_ns", lambda counter: waited)
    assert now() == 10.0


RIGHT = """
import queue, threading
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16 // dist.get_world_size(), sampler=sampler)
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)


def read(batches):
    for batch in loader:
        batches.put(batch)
    batches.put(None)


for epoch in range(4):
    sampler.set_epoch(epoch)
    batches = queue.Queue(2)
    threading.Thread(target=read, args=(batches,), daemon=True).start()
    while (batch := batches.get()) is not None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
"""


def test_sharded_optimizer_states_and_a_thread_that_reads_ahead_are_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(RIGHT)
    result = examine(["train.py"], only="gradients", limits=Limits(stall_s=15))
    assert not result.trouble
    assert not result.findings
    assert not any("stumbled" in reason for reason in result.unseen.values())
