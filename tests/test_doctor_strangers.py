"""Right programs of strangers are not accused, and their mistakes are named: styles that the gallery does not hold.

Each is a handful of facts as the observers write them; test_doctor_programs.py runs programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bigstep.doctor.examination import Examination, diagnose
from bigstep.doctor.facts import (
    Backward,
    Batch,
    Clip,
    Collective,
    End,
    Event,
    Forward,
    Group,
    Load,
    Loader,
    Loss,
    Pass,
    Save,
    Schedule,
    Update,
    Weights,
    Wrap,
)
from bigstep.doctor.finding import Case
from bigstep.doctor.launch import explain
from bigstep.doctor.world import Process, World

Make = Callable[[int, int], list[Event]]


def world(make: Make, size: int, ended: str = "stopped") -> World:
    ranks = [Process([Group(rank=rank, world=size), *make(rank, size)], rank, size) for rank in range(size)]
    return World(ranks, ended=ended, started=size)


def judge(make: Make, *, ended: str = "stopped", **others: World) -> Examination:
    case = Case(one=world(make, 1, ended), many=world(make, 2, ended), **others)
    return diagnose(case, "train.py", runs=[case.single, case.several])


def faults(make: Make, **about: object) -> list[str]:
    return [finding.name for finding in judge(make, **about).faults]  # type: ignore[arg-type]


def update(number: int = 0, **fields: object) -> Update:
    plain = Update(
        optimizer="SGD", number=number, rates=(0.1,), base=0.1, samples=32, norms=(1.0,), used=1.0, local=1.0,
        names=("weight",), after=f"after {number}", micro_steps=1,
    )  # fmt: skip
    return replace(plain, **fields)  # type: ignore[arg-type]


def forward(rank: int, *rows: str, loader: int = -1) -> Forward:
    told = rows or tuple(f"{rank} {index}" for index in range(4))
    return Forward(module="Net", training=True, samples=32, rows=told, loader=loader)


@pytest.mark.parametrize("kept, fault", [((0, 0, 0, 0), ""), ((0, 0, 1, 1), "of Adam"), ((0, 1, 0, 1), "of SGD")])
def test_each_of_two_optimizers_has_gradients_of_its_own_to_clear(kept: tuple[int, ...], fault: str) -> None:
    """The second one steps behind the first, without a backward between."""

    def facts(rank: int, size: int) -> list[Event]:
        told: list[Event] = []
        for number in range(3):
            told += [forward(rank), Backward(value=1.0)]
            told.append(update(2 * number, kept=kept[1] * (number > 0)))
            told.append(update(2 * number + 1, optimizer="Adam", which=1, micro_steps=0, kept=kept[2] * (number > 0)))
        return told

    found = judge(facts).faults
    assert [finding.name for finding in found] == ["uncleared-gradients"] * bool(fault)
    assert all(fault in finding.evidence for finding in found)


def test_a_part_that_is_not_cleared_is_found_and_counted() -> None:
    """As of model.zero_grad() where the optimizer holds a criterion's parameters too."""

    def facts(rank: int, size: int) -> list[Event]:
        two = {"norms": (1.0, 1.0), "names": ("weight", "centers")}
        return [
            event
            for number in range(4)
            for event in (forward(rank), Backward(value=1.0), update(number, kept=int(number > 0), **two))
        ]

    found = judge(facts).faults
    assert [finding.name for finding in found] == ["uncleared-gradients"]
    assert "in 3 of 3 updates the gradients of 1 of 2 parameters" in found[0].evidence


@pytest.mark.parametrize("lines", [("train.py:7", "train.py:7"), ("train.py:7", "train.py:8")])
def test_losses_of_two_kinds_are_no_mean_over_targets(lines: tuple[str, str]) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        parts: list[Event] = [
            event
            for line, targets in zip(lines, (8, 64), strict=True)
            for event in (Loss(reduction="mean", targets=targets, line=line), Backward(value=1.0, line=line))
        ]
        return [event for number in range(3) for event in (forward(rank), *parts, update(number, micro_steps=2))]

    assert faults(facts) == ([] if lines[0] != lines[1] else ["mean-of-means"])


@pytest.mark.parametrize("change", ["loop", "two losses", "cleared between"])
def test_two_backward_passes_without_a_loader_add_up_in_a_loop_only(change: str) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        second = "train.py:8" if change == "two losses" else "train.py:7"
        parts: list[Event] = [forward(rank), Backward(value=1.0, line="train.py:7")]
        parts += [forward(rank), Backward(value=1.0, line=second, anew=change == "cleared between")]
        return [event for number in range(3) for event in (*parts, update(number, micro_steps=2))]

    assert faults(facts) == (["undivided-accumulation"] if change == "loop" else [])


@pytest.mark.parametrize("cut", [True, False])
def test_a_batch_that_is_cut_into_micro_batches_adds_up_and_two_views_of_it_do_not(cut: bool) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        told: list[Event] = []
        for number in range(3):
            rows = [f"{rank} {number} {index}" for index in range(4)]
            parts = (rows[:2], rows[2:]) if cut else (rows, rows)
            told.append(Batch(loader=0, number=0, rows=tuple(rows)))
            told += [event for part in parts for event in (forward(rank, *part, loader=0), Backward(value=1.0))]
            told.append(update(number, micro_steps=2))
        return told

    assert faults(facts) == (["undivided-accumulation"] if cut else [])


def test_clipping_before_a_step_that_a_scaler_skips_is_not_early() -> None:
    def facts(rank: int, size: int, anew: bool = True) -> list[Event]:
        tried: list[Event] = [forward(rank), Backward(value=1.0), Clip(most=1.0, line="train.py:9")]
        again = replace(tried[1], anew=anew)
        last = update(scaled=True, micro_steps=2, clipped=True, grown=int(not anew))
        return [*tried, tried[0], again, tried[2], last]

    assert faults(facts) == []
    assert faults(lambda rank, size: facts(rank, size, anew=False)) == ["clipped-early"], "the control"


def test_the_gradients_of_two_networks_may_be_clipped_one_after_the_other() -> None:
    def facts(rank: int, size: int, grown: int = 0) -> list[Event]:
        told: list[Event] = []
        for number in range(3):
            told += [forward(rank), Backward(value=1.0, line="train.py:7"), Clip(most=1.0, line="train.py:8")]
            told += [Backward(value=1.0, line="train.py:9"), Clip(most=1.0, line="train.py:10")]
            told += [update(2 * number), update(2 * number + 1, names=("critic",), micro_steps=0, grown=grown)]
        return told

    assert faults(facts) == []
    assert faults(lambda rank, size: facts(rank, size, 1)) == ["clipped-early"], "the control"


@pytest.mark.parametrize("read, expected", [("pretrained.pt", "advice"), ("last_3.pt", "fault")])
def test_weights_alone_are_a_result_unless_the_program_begins_with_such_a_file(read: str, expected: str) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        save = Save(path="last_4.pt", holds=("weights",), lacks=("optimizer",), updates=1)
        return [Load(path=read), forward(rank), Backward(value=1.0), update(), *([save] if rank == 0 else [])]

    found = [finding.level for finding in judge(facts).findings if finding.name == "incomplete-checkpoint"]
    assert found == [expected]


@pytest.mark.parametrize("parts", [("optimizer", "scheduler"), ("optimizer",)])
def test_the_parts_of_a_checkpoint_may_have_a_file_each(parts: tuple[str, ...]) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        files: list[Event] = [Save(path=f"{part}.pt", holds=(part,), updates=1) for part in parts]
        weights = Save(path="model.pt", holds=("weights",), lacks=("optimizer", "scheduler"), updates=1)
        read: list[Event] = [Load(path="model.pt")]
        return [*read, forward(rank), Backward(value=1.0), update(), *([weights, *files] if rank == 0 else [])]

    found = judge(facts).faults
    assert [finding.title for finding in found] == ["the checkpoint lacks the scheduler"] * (len(parts) == 1)


@pytest.mark.parametrize("position", [2, 0])
def test_a_scheduler_that_is_made_where_the_run_goes_on_need_not_be_saved(position: int) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        step = Schedule(scheduler="StepLR", position=2)
        holds = ("counter", "optimizer", "weights")
        save = Save(path="last.pt", holds=holds, lacks=("scheduler",), resumable=True, updates=1)
        return [forward(rank), Backward(value=1.0), update(), step, *([save] if rank == 0 else [])]

    def again(rank: int, size: int) -> list[Event]:
        made: list[Event] = [Schedule(scheduler="StepLR", position=position)] if position else []
        return [Load(path="last.pt"), *made, forward(rank), Backward(value=1.0), update()]

    assert faults(facts, resumed=world(again, 2)) == ([] if position else ["incomplete-checkpoint"])


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_warm_up_by_hand_says_nothing_of_the_rate_that_it_comes_to(by_hand: bool) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        first = 0.01 * size**2  # the rate grows with the batch, and a pass has half as many batches to get there
        rates = [first * (number + 1 if by_hand else 1) for number in range(6)]
        return [forward(rank), *(update(n, rates=(rate,), base=rate) for n, rate in enumerate(rates))]

    assert faults(facts) == ([] if by_hand else ["wrong-rate"])


@pytest.mark.parametrize("updates", [60, 20])
def test_a_schedule_in_updates_fits_a_training_that_counts_updates(updates: int) -> None:
    """However often a pass was begun again: passes are cut short where what happens between them is looked for."""

    def facts(rank: int, size: int, count: int = 12, cut: int = 16) -> list[Event]:
        told: list[Event] = [Loader(loader=0, dataset="Set", samples=512, drawn=512 // size, batch=32 // size)]
        for number in range(count):
            if number % cut == 0:
                told.append(Pass(loader=0, number=number // cut, sampler_epoch=number // cut))
            told += [forward(rank, loader=0), Backward(value=1.0), update(number, samples=32 // size)]
            told.append(Schedule(scheduler="CosineAnnealingLR", position=number + 1, horizon=60))
        return told

    short = world(lambda rank, size: facts(rank, size, updates, 3), 2, "finished")
    found = [finding.name for finding in judge(facts, short=short).findings]
    assert found == ([] if updates == 60 else ["misplaced-schedule"])


@pytest.mark.parametrize("every", ["pass", "update"])
def test_a_schedule_in_passes_is_told_from_one_in_updates_however_many_micro_batches(every: str) -> None:
    """Eight passes of seven updates of eight micro-batches each."""

    def facts(rank: int, size: int, count: int = 12) -> list[Event]:
        told: list[Event] = [Loader(loader=0, dataset="Set", samples=896, drawn=896 // size, batch=16 // size)]
        for number in range(count):
            if number % 7 == 0:
                told.append(Pass(loader=0, number=number // 7, sampler_epoch=number // 7))
            told += [forward(rank, loader=0), Backward(value=1.0), update(number, samples=128 // size, micro_steps=8)]
            if every == "update" or number % 7 == 6:
                position = number + 1 if every == "update" else number // 7 + 1
                told.append(
                    Schedule(scheduler="CosineAnnealingLR", position=position, horizon=56 if every == "update" else 8)
                )
        return told

    short = world(lambda rank, size: facts(rank, size, 56), 2, "finished")
    assert "misplaced-schedule" not in [finding.name for finding in judge(facts, short=short).findings]


def test_a_rank_that_fell_by_an_error_of_its_own_is_no_disorder_of_collectives() -> None:
    def facts(rank: int, size: int, why: str = "KeyError: 'loss' (train.py:9)") -> list[Event]:
        call = Collective(operation="all_reduce", values=1, line="train.py:12")
        told: list[Event] = [forward(rank), Backward(value=1.0), update()]
        return [*told, call] if rank == 0 else [*told, End(reason="failed", message=why)]

    assert faults(facts, ended="failed") == []
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert faults(lambda rank, size: facts(rank, size, lost), ended="failed") == ["waiting-ranks"]


@pytest.mark.parametrize("swaps", [False, True])
def test_ranks_are_compared_by_the_calls_of_the_groups_that_they_share(swaps: bool) -> None:
    """Two pairs call apart and then meet; rank 3 may come to the meeting first."""

    def facts(rank: int, size: int) -> list[Event]:
        pair = (0, 1) if rank < 2 else (2, 3)
        own = [Collective(operation="all_reduce", values=1 + pair[0], group=pair)] * (3 - pair[0])
        meeting = [Collective(operation="barrier", line="train.py:9")]
        calls = [*meeting, *own] if swaps and rank == 3 else [*own, *meeting]
        return [forward(rank), Backward(value=1.0), update(), *calls]

    found = diagnose(Case(many=world(facts, 4, "hung")), "train.py").faults
    assert [finding.name for finding in found] == ["waiting-ranks"]
    assert ("all_reduce of 3 values among ranks 2, 3 () on rank 2 and barrier" in found[0].evidence) == swaps
    assert (found[0].title == "ranks wait for each other") != swaps


@pytest.mark.parametrize(
    "said, told",
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: '../data/x.pt' (train.py:3)", "the folder above"),
        ("ValueError: SyncBatchNorm layers only work with GPU modules (train.py:3)", "needs a GPU"),
    ],
)
def test_what_only_the_examination_made_impossible_is_explained(said: str, told: str) -> None:
    assert told in explain(World([], ended="failed", message=said))


@pytest.mark.parametrize("factor, summed", [(1.0, True), (1 / 32, True), (1.0, False)])
def test_a_sum_over_the_global_batch_is_no_mean_that_was_forgotten(factor: float, summed: bool) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        hand = [Collective(operation="all_reduce", target="gradient", values=8, done=done) for done in (False, True)]
        loss = Backward(value=1.0, factor=factor, summed=summed)
        return [forward(rank), loss, *hand, update(used=float(size), local=1.0)]

    assert faults(facts) == ([] if summed and factor == 1 else ["scaled-gradients"])


def test_an_exchange_that_fails_later_is_said_to_be_missing_there() -> None:
    def facts(rank: int, size: int) -> list[Event]:
        told: list[Event] = [Wrap(wrapper="DistributedDataParallel", parameters=1), Weights(parameters="same")]
        for number in range(3):
            own = 1.0 + rank * (number == 1)
            after = f"after {number}" + f" on {rank}" * (number > 0)
            told += [forward(rank), Backward(value=1.0, synchronised=number != 1, line=f"train.py:{number}")]
            told.append(update(number, norms=(own,), after=after))
        return told

    found = judge(facts).faults
    assert [finding.name for finding in found] == ["unexchanged-gradients"]
    assert "before update 2" in found[0].evidence
    assert found[0].line == "train.py:1"


def test_an_endless_sampler_has_no_share_to_tell_of() -> None:
    def facts(rank: int, size: int) -> list[Event]:
        told: list[Event] = [Loader(loader=0, dataset="Set", samples=512, drawn=-1, batch=2, sampler="Endless")]
        for step in range(4):
            rows = (f"{2 * step}", f"{2 * step + 1}")
            told += [Batch(loader=0, number=0, indices=tuple(map(int, rows)), rows=rows), forward(rank, loader=0)]
        return told

    found = judge(facts).faults
    assert [finding.name for finding in found] == ["same-samples"]
    assert found[0].evidence == "Endless splits nothing, and the first 4 batches are the same on all 2 ranks"
    assert "%" not in found[0].cost


@pytest.mark.parametrize("sampler, expected", [("SequentialSampler", []), ("Groups", ["same-order"])])
def test_the_order_of_a_random_split_that_is_read_as_it_is_was_chosen(sampler: str, expected: list[str]) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        told: list[Event] = [Loader(loader=0, dataset="Subset", samples=8, drawn=8 // size, batch=2, sampler=sampler)]
        for number in range(2):
            told.append(Pass(loader=0, number=number))
            for step in range(2):
                mine = tuple(7 * (2 * step + i) % 8 + 8 * rank for i in range(2))
                told += [Batch(loader=0, number=number, indices=mine, rows=tuple(map(str, mine)))]
                told += [forward(rank, loader=0)]
        return told

    assert faults(facts) == expected


@pytest.mark.parametrize("alike", [False, True])
def test_streams_that_draw_with_replacement_share_samples_by_chance(alike: bool) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        drawn = [7 * (n + 3 * rank * (not alike)) % 24 % 17 for n in range(24)]
        rows = tuple(map(str, drawn))
        stream = Loader(loader=0, dataset="Draws", iterable=True, batch=24)
        return [stream, Batch(loader=0, number=0, rows=rows), forward(rank, loader=0)]

    assert faults(facts) == ["same-samples"] * alike


@pytest.mark.parametrize("step_s, level", [(0.001, "advice"), (0.1, "fault")])
def test_a_value_that_is_fetched_is_no_fault_of_a_step_that_is_over_at_once(step_s: float, level: str) -> None:
    def facts(rank: int, size: int) -> list[Event]:
        timed = {"norms": (), "total_s": step_s, "sync_s": 0.1 * step_s, "syncs": 3}
        return [forward(rank), Backward(value=1.0), *(update(number, **timed) for number in range(6))]

    found = {finding.name: finding.level for finding in judge(facts).findings}
    assert found["synchronising-calls"] == level


def test_rates_that_part_later_are_found() -> None:
    """As of a scheduler that follows each rank's own loss; weights are compared in the first updates only."""

    def facts(rank: int, size: int) -> list[Event]:
        rates = [0.1] * 7 + [0.1 / (1 + rank)]
        later = [update(n, rates=(rate,), norms=() if n > 1 else (1.0,), after="") for n, rate in enumerate(rates)]
        return [Weights(parameters="same"), forward(rank), Backward(value=1.0), *later]

    found = judge(facts).faults
    assert [finding.name for finding in found] == ["drifting-weights"]
    assert found[0].evidence == "after update 8 the rates are 0.1, 0.05"


def test_gradients_that_are_no_numbers_on_all_ranks_do_not_differ() -> None:
    strange = [float("nan"), float("nan")]  # two objects, as of two files
    found = faults(lambda rank, size: [forward(rank), Backward(value=1.0), update(norms=(strange[rank] * 1.0,))])
    assert "unexchanged-gradients" not in found
