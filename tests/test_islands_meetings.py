"""Meetings of islands: who counts how much, who keeps its own way, what islands begin with, and how a run ends."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bigstep.check import Own, Trial, bigstep_loop
from bigstep.engine.methods.islands import Islands
from bigstep.engine.methods.meeting import Transport
from bigstep.engine.methods.parallel import Debt, Parallel
from bigstep.engine.methods.rounds import Rounds
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.ranks import Ranks
from bigstep.exchange import sum_owed
from bigstep.records import read_run
from bigstep.train import fit
from test_islands import ADAMW, DILOCO, close, config, data, dense, go_on, network, path_of
from test_islands_lost import break_off
from worlds import World

FULL = ("data.drop_last=true",)
"""Two steps an epoch, in which every island has samples."""

# ---- where islands begin


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_islands_that_begin_later_go_on_with_the_momentum_of_the_synchronous_run(
    world: Callable[[int], World], tmp_path: Path, ranks: int
) -> None:
    settings = (*FULL, "optimizer.momentum=0.9", "optimizer.weight_decay=0.01")
    alone = path_of(str(tmp_path / "one"), *settings)
    later = (str(tmp_path / "later"), *settings, "islands.count=2", "islands.begin=1")
    islands = path_of(*later) if ranks == 1 else world(ranks).run(path_of, *later)[0]
    # momentum is linear: the mean of islands that meet in every step has the momentum of the synchronous run
    assert islands["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    for name in ("0.weight", "5.weight"):
        ours, theirs = (torch.tensor(run["weights"][name]) for run in (islands, alone))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_islands_that_begin_later_have_optimizer_state_of_their_own() -> None:
    places: list[int] = []
    part = Islands.part

    def look(self: Islands) -> None:
        part(self)
        states = [state for island in self.islands for state in island.optimizer_state.values()]
        places.extend(state["momentum_buffer"].data_ptr() for state in states)

    with mock.patch.object(Islands, "part", look):
        fit(config("islands.count=4", "islands.begin=1", "epochs=2"), network(), (data(), data()), device="cpu")
    assert len(set(places)) == len(places) == 4 * len(list(network().parameters()))


def owed_where_islands_begin(folder: str, *settings: str) -> list[float]:
    """Return how far from what the synchronous run owes each island's debt is, and how much it is."""
    seen: dict[str, Any] = {}
    collect, part = Parallel.state_dict, Islands.part

    def note(self: Parallel) -> Any:
        seen["state"] = collect(self) or seen.get("state")
        return seen["state"]

    def look(self: Islands) -> None:
        part(self)
        seen["debts"] = [island.method.parts()["exchange"] for island in self.islands]
        seen["owed"] = [dict(debt._owed) for debt in seen["debts"] if isinstance(debt, Debt)]

    with mock.patch.object(Parallel, "state_dict", note), mock.patch.object(Islands, "part", look):
        path_of(folder, *settings)
    if not seen["state"]:
        return []
    owed = sum_owed(seen["state"])
    assert len(seen["owed"]) == 1
    return [float(sum((owed[name] - debt[name]).abs().sum() for name in owed)) for debt in seen["owed"]] + [
        float(sum(each.abs().sum() for each in owed.values()))
    ]


def test_islands_that_begin_later_owe_what_the_synchronous_exchange_owed(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    settings = (
        *FULL,
        "islands.count=2",
        "islands.every=2",
        "islands.begin=1",
        "exchange={collective: gather, codec: onebit}",
    )
    apart, owed = world(2).run(owed_where_islands_begin, str(tmp_path / "run"), *settings)[0]
    assert apart == 0 < owed


def weights_at_parting(folder: str, *settings: str) -> list[float]:
    seen: list[float] = []
    part = Islands.part

    def look(self: Islands) -> None:
        part(self)
        assert self.rounds is not None
        seen.extend(self.rounds.outer.fragments[0].agreed.tolist())

    with mock.patch.object(Islands, "part", look):
        path_of(folder, *settings)
    return seen


def test_a_gradient_that_is_on_its_way_arrives_before_islands_part(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    late = (*FULL, "exchange.double_buffer=true")
    ended = world(2).run(path_of, str(tmp_path / "ended"), *late, "epochs=1")[0]["weights"]
    islands = ("islands.count=2", "islands.every=2", "islands.begin=1", "epochs=2")
    parted = world(2).run(weights_at_parting, str(tmp_path / "parted"), *late, *islands)[0]
    ordered = [ended[name] for name, _ in network().named_parameters()]
    torch.testing.assert_close(torch.tensor(parted), torch.cat([torch.tensor(each).flatten() for each in ordered]))


# ---- who counts how much, and who keeps its own way


def test_an_island_counts_by_what_it_has_seen_since_it_last_met_in_a_fragment(tmp_path: Path) -> None:
    counted: dict[tuple[int, int], list[int]] = {}
    count = Rounds._samples_of_all

    def note(self: Rounds, number: int) -> list[int]:
        counts = count(self, number)
        counted.setdefault((number, self.steps), counts)  # the last step has a last meeting too
        return counts

    with mock.patch.object(Rounds, "_samples_of_all", note):
        path_of(str(tmp_path / "run"), "islands.count=8", "islands.every=2", "islands.fragments=2", "epochs=2")
    # three steps an epoch: 8 samples each, 8 each, and the last 8 for the first island alone
    assert counted[0, 2] == [16] * 8
    assert counted[0, 4] == [16] + [8] * 7, "the third step and the fourth"
    assert counted[1, 3] == [16] + [8] * 7, "the second step and the third"
    assert counted[0, 6] == [16] + [8] * 7, "the fifth and the sixth"


MISSING = ("islands.count=8", "islands.every=4", "islands.fragments=2", "islands.overlap=3", "islands.drop=0.5")


def test_who_misses_the_meeting_of_a_fragment_keeps_its_own_way_in_it_and_nobody_else(tmp_path: Path) -> None:
    drawn: dict[int, list[bool]] = {}
    checked = []
    depart, arrive = Rounds._depart, Rounds._arrive

    def note(self: Rounds, number: int, *, everybody: bool = False) -> None:
        drawn[number] = [everybody or not self._misses(number, island) for island in range(8)]
        depart(self, number, everybody=everybody)

    def look(self: Rounds, number: int, keep: float = 0.0) -> None:
        index, on_its_way = self.outer.fragments[number].indices[0], number in self.travelling
        before = [island.weights[index].clone() for island in self.islands]
        arrive(self, number, keep)
        moved = [not torch.equal(old, i.weights[index]) for old, i in zip(before, self.islands, strict=True)]
        if on_its_way:
            assert [came or not went for came, went in zip(drawn[number], moved, strict=True)] == [True] * 8
            assert sum(moved) >= sum(drawn[number]) - 1
            checked.append(sum(drawn[number]))

    with mock.patch.object(Rounds, "_depart", note), mock.patch.object(Rounds, "_arrive", look):
        path_of(str(tmp_path / "run"), *MISSING, *FULL, "epochs=6")
    assert len(checked) >= 6
    assert min(checked) < 8


# ---- how a run ends

ENDS = {
    "the last fragment has just met": ("islands.every=4", "islands.fragments=2", "epochs=2"),
    "some have missed the last meeting": ("islands.every=3", "islands.drop=0.5"),
    "one without samples has missed the last meeting": ("islands.every=1", "islands.drop=0.4"),
    "two fragments are on their way": MISSING[1:],
    "a meeting has just set out": ("islands.every=3", "islands.overlap=1"),
}


@pytest.mark.parametrize("end", ENDS)
def test_all_islands_end_with_the_same_weights(world: Callable[[int], World], tmp_path: Path, end: str) -> None:
    settings = ("islands.count=8", DILOCO, *ENDS[end])
    islands: list[list[Tensor]] = []
    finish = Islands.finish

    def look(self: Islands) -> None:
        finish(self)
        islands.extend(island.weights for island in self.islands)

    with mock.patch.object(Islands, "finish", look):
        alone = path_of(str(tmp_path / "1"), *settings)
    assert all(torch.equal(a, b) for own in islands[1:] for a, b in zip(islands[0], own, strict=True))
    together = world(2).run(path_of, str(tmp_path / "2"), *settings)
    close(together[0], alone)
    assert together[0]["weights"] == together[1]["weights"]


def test_steps_behind_a_meeting_that_is_on_its_way_count_at_the_end(tmp_path: Path) -> None:
    outer = "islands.outer={name: sgd, lr: 1.0, momentum: 0.0}"
    settings = (outer, "islands.every=4", "islands.overlap=3", "optimizer.momentum=0", "norm.momentum=0")
    ended = {steps: path_of(str(tmp_path / str(steps)), *settings, max_steps=steps)["weights"] for steps in (8, 9)}
    assert ended[8]["5.weight"] != ended[9]["5.weight"], "the meeting that set out behind the eighth step is not all"


@pytest.mark.parametrize("outer", ["islands.outer={name: nesterov, lr: 0.7, momentum: 0.9}", "islands.overlap=0"])
def test_a_run_that_ends_with_a_meeting_holds_no_second_one(tmp_path: Path, outer: str) -> None:
    applied = []
    from bigstep.engine.methods.outer import Outer

    apply = Outer.apply

    def note(self: Outer, number: int, mean: Tensor) -> None:
        applied.append(number)
        apply(self, number, mean)

    with mock.patch.object(Outer, "apply", note):
        path_of(str(tmp_path / "run"), "islands.count=4", "islands.every=3", outer)
    assert applied == [0, 0, 0]


TOGETHER = {
    "averaging": ("islands.every=3", "islands.fragments=2", "islands.overlap=1", "islands.codec=int4",
                  "islands.drop=0.3"),
    "DiLoCo": (DILOCO, ADAMW, "lr.base=0.003", "islands.every=4", "islands.fragments=3", "islands.overlap=2",
               "islands.codec=topk", "islands.drop=0.4", "plan=[{epoch: 1, count: 16, local_batch: 2}]"),
}  # fmt: skip


@pytest.mark.parametrize("method", TOGETHER)
@pytest.mark.parametrize("at", [2, 6])
def test_all_settings_together_go_through_a_break_on_any_ranks(
    world: Callable[[int], World], tmp_path: Path, method: str, at: int
) -> None:
    settings = ("islands.count=4", "islands.begin=0.5", "evaluate_every=0.4", *TOGETHER[method])
    saved = (*settings, "checkpoint.every=0.000001")
    whole = path_of(str(tmp_path / "whole"), *settings)
    break_off(str(tmp_path / "one"), at, *saved)
    resumed = path_of(str(tmp_path / "one"), *saved, resume=True)
    assert resumed["weights"] == whole["weights"], "nor does an evaluation leave a trace"
    world(2).run(break_off, str(tmp_path / "two"), at, *saved)
    together = world(2).run(go_on, str(tmp_path / "two"), *saved)
    close(together[0], whole)
    assert together[0]["weights"] == together[1]["weights"]


# ---- what is told


def bad_data() -> TensorDataset:
    """One sample of a later worker is not finite: in every epoch one island drops one step."""
    inputs, target = data().tensors
    inputs[5] = torch.inf
    return TensorDataset(inputs, target)


def count_skipped(folder: str, *settings: str) -> int:
    torch.manual_seed(0)
    result = fit(config("nonfinite=skip", *settings), dense(), (bad_data(), data()), out=folder, device="cpu")
    return int(result.facts["skipped_steps"])


@pytest.mark.parametrize("begin", [0, 1])
def test_steps_that_islands_drop_are_counted(world: Callable[[int], World], tmp_path: Path, begin: int) -> None:
    settings = ("islands.count=4", "islands.every=2", f"islands.begin={begin}")
    assert count_skipped(str(tmp_path / "1"), *settings) == 3
    assert world(2).run(count_skipped, str(tmp_path / "2"), *settings) == [3, 3]


def slow_second_rank(folder: str, *settings: str) -> None:
    step = Synchronous.step

    def late(self: Synchronous, part: Any, batches: Any) -> Any:
        import torch.distributed as dist

        if dist.get_rank() == 1 and part.position.step == 4:
            time.sleep(0.5)
        return step(self, part, batches)

    # no flush in between, in which the other would wait too
    rare = mock.patch("bigstep.engine.meter._SECONDS_BETWEEN_FLUSHES", 1e9)
    with mock.patch.object(Synchronous, "step", late), rare:
        path_of(folder, *settings)


def test_waiting_for_a_meeting_is_time_of_the_exchange(world: Callable[[int], World], tmp_path: Path) -> None:
    world(2).run(slow_second_rank, str(tmp_path / "run"), "islands.count=2", "islands.every=3")
    rows = {row["step"]: row for row in read_run(tmp_path / "run").train}
    assert rows[6]["exchange_s"] > 0.3, "rank 0 waits for the other, which is slow in the fifth step"
    assert rows[6]["compute_s"] < 0.3


# ---- memory


@contextmanager
def counting(count: Callable[[], None]) -> Iterator[None]:
    """Call a function when a meeting has been sent off, and within every evaluation."""
    start, evaluation = Transport.start, Islands.evaluation

    def send(self: Transport, *arguments: Any) -> Any:
        meeting = start(self, *arguments)
        count()
        return meeting

    @contextmanager
    def lend(self: Islands) -> Iterator[nn.Module]:
        with evaluation(self) as model:
            count()
            yield model

    with mock.patch.object(Transport, "start", send), mock.patch.object(Islands, "evaluation", lend):
        yield


def most_values(islands: int, codec: str) -> int:
    """Return the most numbers in all tensors at any meeting or evaluation of a run on one rank."""
    most = 0

    def count() -> None:
        nonlocal most
        gc.collect()
        alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.dtype == torch.float64]
        held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() // 8 for each in alive}
        most = max(most, sum(held.values()))

    loop = bigstep_loop()
    settings = (f"islands.count={islands}", "islands.every=2", f"islands.codec={codec}", DILOCO, ADAMW, "lr.base=0.003")
    run = loop.start(Own(dense, None, data()), Trial(config(*settings), 136, 136), Ranks())
    assert loop.train is not None
    assert loop.evaluate is not None
    with counting(count):
        loop.train(run, -1, None)
        loop.evaluate(run)
    loop.finish(run)
    return most


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_meetings_and_evaluations_take_no_copy_for_each_island(codec: str) -> None:
    size = sum(parameter.numel() for parameter in dense().parameters())
    copies = 3 + (codec != "none")  # weights and AdamW's two averages, and what the code owes
    most = {count: most_values(count, codec) for count in (2, 8)}
    assert most[8] - most[2] == 6 * copies * size
