"""The search on CIFAR-10 that is to be finished: grids grow until the best is inside, and one rule follows from it."""

from __future__ import annotations

import importlib.util
import math
import time
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bigstep.config.text import apply_settings
from bigstep.data.catalog import open_data


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("cifar10", "huge"):
        monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks" / folder))


@pytest.fixture
def converged(scripts: None) -> ModuleType:
    import converged  # type: ignore[import-not-found]

    return converged


def finish(lanes: Any, score: Any) -> list[Any]:
    """Carry out the lanes of a part with scores in place of runs."""
    planned = []
    for lane in lanes:
        asked = next(lane)
        try:
            while True:
                planned.append(asked)
                asked = lane.send({"accuracy": score(asked)})
        except StopIteration:
            continue
    return planned


def rate_in(planned: Any) -> float:
    (rate,) = (each for each in planned.settings if each.startswith("lr.base="))
    return float(rate.removeprefix("lr.base="))


def test_every_grid_grows_until_its_best_is_inside_and_no_budget_is_larger(converged: ModuleType) -> None:
    best = {14720: 16.0, 2048: 1e-9}  # times the middle: three doublings away, and out of reach

    def score(planned: Any) -> float:
        if planned.name.startswith("tune "):  # a second look that finds nothing
            return 0.5
        middles = dict(zip(best, converged.MIDDLES[planned.recipe], strict=True))
        return -abs(rate_in(planned) / middles[planned.batch] - best[planned.batch])

    planned = [*finish(converged.widen({}), score), *finish(converged.look({}), score)]
    rows = {f"{each.name} seed 0": {"accuracy": score(each)} for each in planned}
    for recipe, (middle, _) in converged.MIDDLES.items():
        inside, outside = (converged.found(rows, recipe, batch) for batch in (16384, 2048))
        assert sorted(inside) == pytest.approx([middle * 2.0**k for k in range(-1, 6)])
        assert converged.is_inside(inside)
        assert len(outside) == 7
        assert not converged.is_inside(outside), "the budget is spent, and the table says that it is open"
    assert all(each.holdout == 0.1 for each in planned), "no search sees the test images"
    looked = [each.recipe for each in planned if each.name.startswith("tune ")]
    assert {recipe: looked.count(recipe) for recipe in looked} == dict.fromkeys(converged.LOOKED_AGAIN, 4)
    steps = {batch: (50_000 // batch, 45_000 // standing) for batch, standing in converged.SEARCHED.items()}
    assert steps[16384] == (3, 3), "a rate is searched in as many steps as it is used in"


def searched(converged: ModuleType, recipe: str, best: dict[int, float], helps: str = "") -> dict[str, Any]:
    """The book of a whole search that found these rates, by batch; `helps`: what a second look kept."""
    batches = {converged.SEARCHED[batch]: rate for batch, rate in best.items()}

    def score(planned: Any) -> float:
        if planned.name.startswith("tune "):
            return 0.9 if helps and planned.name.endswith(helps) else 0.5
        return 1 - abs(math.log(rate_in(planned) / batches[planned.batch]))

    return {each.called: {"accuracy": score(each)} for each in finish([converged.search_of(recipe)], score)}


def test_the_rule_goes_through_both_searches_once_they_are_over(converged: ModuleType) -> None:
    rows = searched(converged, "sony", {16384: 12.0, 2048: 3.0})
    rule = converged.rule_of(rows, "sony")
    rates = [converged.base_rate("sony", batch, rule) for batch in (512, 2048, 8192, 16384, 25000)]
    beyond = [3.0 * (batch / 2048) ** (2 / 3) for batch in (8192, 16384, 25000)]
    assert rates == pytest.approx([1.5, 3.0, *beyond], rel=2e-3)  # batches are of whole workers, powers of 3 digits
    assert rates[3] == pytest.approx(12.0, rel=1e-3)
    assert converged.rule_of(rows, "lars") is None
    planned = {each.batch: each for lane in converged.converged(rows, (0,)) if (each := next(lane)).recipe == "sony"}
    assert planned[16384].settings == rule
    assert planned[16384].name == "converged sony 16384"
    assert planned[512].name == "table sony 512", "the rate there is what it was, and so is the run"
    del rows["search sony 14720 rate 24 seed 0"]
    assert converged.rule_of(rows, "sony") is None, "the best so far is at an end"
    others = {next(lane).recipe for lane in converged.converged(rows, (0,))}
    assert others == {"leap", "muon"}, "no test image is looked at before the rate is known"


def test_what_a_second_look_kept_goes_with_every_batch_and_has_grids_of_its_own(converged: ModuleType) -> None:
    rows = searched(converged, "fair", {16384: 0.4, 2048: 0.8}, helps="lighter")
    kept = ("optimizer.weight_decay=0.0001",)
    assert converged.kept_of(rows, "fair") == kept
    assert converged.rule_of(rows, "fair")[:1] == kept
    assert not any(converged.stays(rows, "fair", batch) for batch in converged.BATCHES)
    assert converged.found({**rows, "search fair 2048 rate 9 seed 0": {"accuracy": 1.0}}, "fair", 2048).keys() == {
        0.4, 0.8, 1.6,
    }  # fmt: skip


def test_runs_of_an_earlier_preset_do_not_count_in_a_search(converged: ModuleType) -> None:
    """The first search had other stages of sony and google; what it found of the others is taken up."""
    rows = {f"search {recipe} 2048 rate 9 seed 0": {"accuracy": 0.9} for recipe in converged.MIDDLES}
    taken = {recipe for recipe in converged.MIDDLES if converged.found(rows, recipe, 2048)}
    assert taken == set(converged.MIDDLES) - {"sony", "google"}


def test_every_run_that_is_planned_can_be_configured(converged: ModuleType) -> None:
    import ours  # type: ignore[import-not-found]
    from runs import config_of, made_tiny  # type: ignore[import-not-found]

    rows = {
        name: row
        for recipe, middles in converged.MIDDLES.items()
        for name, row in searched(converged, recipe, dict(zip(converged.SEARCHED, middles, strict=True))).items()
    }
    seen: dict[str, Any] = {}

    def better_and_better(planned: Any) -> float:
        rows[planned.called] = {"accuracy": 0.9 + 1e-4 * len(rows)}
        return rows[planned.called]["accuracy"]

    for part in (*ours.ORDER.values(), *converged.ORDER.values(), *converged.ALSO.values()):
        for planned in finish(part(rows), better_and_better):
            if planned.seed == 0:
                config = config_of(planned.recipe, planned.batch, planned.settings, planned.epochs, planned.preset)
                largest = max(stage.count * stage.local_batch for stage in (config.workers, *config.stages))
                grown = config.growth.most if config.plan == "auto" else 1
                assert largest * grown == pytest.approx(planned.batch, rel=0.01), planned.name
                assert made_tiny(config).recipe == config.recipe
                assert apply_settings(config, ["seed=1"]).seed == 1
                seen[planned.name] = config
    proved = seen["converged leap 25000"]
    assert [(stage.epoch, stage.count) for stage in proved.plan] == [(18, 390), (26, 781)], "what helped is kept"
    assert (proved.optimizer.momentum, proved.loss.label_smoothing) == (0.6, 0.2)


def test_a_search_is_read_from_the_book_again_and_is_not_over_before_its_last_run() -> None:
    import ours

    accuracies = {"rate 0.48": 0.93, "rate 0.96": 0.92, "momentum 0.6": 0.94}

    def score(planned: Any) -> float:
        return accuracies.get(planned.name.split(maxsplit=3)[3], 0.9)

    planned = finish([ours.search_of("leap")], score)
    rows = {each.called: {"accuracy": score(each)} for each in planned}
    assert ours.settings_of(rows, "leap") == ("lr.base=0.48", "optimizer.momentum=0.6")
    del rows[planned[-1].called]
    assert ours.settings_of(rows, "leap") == ()


class Pool:
    """Takes the place of processes, in this one."""

    def submit(self, function: Any, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.mark.parametrize("alone", [True, False])
def test_lanes_share_a_crew_and_what_is_in_the_book_is_not_run_again(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lanes  # type: ignore[import-not-found]
    from runs import Book, Planned

    ran: list[str] = []
    answers: list[Any] = []

    def trained(planned: Any, folder: str, *, tiny: bool) -> dict[str, Any]:
        ran.append(planned.called)
        return {"name": planned.called, "accuracy": 0.5, "steps": 1, "seconds": 1.0, "wall_s": 10.0}

    def search(name: str) -> Any:
        for number in range(3):
            answer = yield Planned(f"{name} {number}", "leap", 512)
            answers.append(answer)

    monkeypatch.setattr(lanes, "trained", trained)
    monkeypatch.setattr(lanes, "ProcessPoolExecutor", lambda *arguments, **named: Pool())
    book = Book(tmp_path / "book.jsonl")
    crew = lanes.Crew(book, "folder", 2, time.monotonic() + 1000, tiny=False)
    assert crew.carry_out(iter([search("a"), search("b")]), alone=alone)
    assert len(ran) == len(answers) == 6
    assert all(row.get("shared", False) is not alone for row in book.rows.values())
    again = lanes.Crew(Book(book.path), "folder", 2, time.monotonic() + 1000, tiny=False)
    assert again.carry_out(iter([search("a"), search("c")]), alone=alone)
    assert ran[6:] == ["c 0 seed 0", "c 1 seed 0", "c 2 seed 0"]
    late = lanes.Crew(book, "folder", 2, time.monotonic() + 12, tiny=False)
    late.walls = [10.0]
    assert late.carry_out(iter([search("d")]), alone=alone), "a run of ten seconds ends in time"
    late.until = time.monotonic() + 9
    assert not late.carry_out(iter([search("e")]), alone=alone), "here it would not"


@pytest.mark.parametrize("alone", [True, False])
def test_a_run_that_breaks_is_left_out_and_the_others_go_on(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lanes
    from runs import Book, Planned

    def trained(planned: Any, folder: str, *, tiny: bool) -> dict[str, Any]:
        if planned.batch == 512:
            raise RuntimeError("out of memory")
        return {"name": planned.called, "accuracy": 0.5, "steps": 1, "seconds": 1.0, "wall_s": 1.0}

    monkeypatch.setattr(lanes, "trained", trained)
    monkeypatch.setattr(lanes, "ProcessPoolExecutor", lambda *arguments, **named: Pool())
    book = Book(tmp_path / "book.jsonl")
    crew = lanes.Crew(book, "folder", 2, time.monotonic() + 1000, tiny=False)
    assert crew.carry_out(lanes.singles(Planned(f"a {n}", "leap", n) for n in (256, 512, 1024)), alone=alone)
    assert list(book.rows) == ["a 256 seed 0", "a 1024 seed 0"], "what broke is no result, and is tried again"
    assert "RuntimeError: out of memory" in capsys.readouterr().out


def test_a_run_whose_batch_grows_by_itself_is_a_line_of_the_book(
    scripts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its remarks carry noise scales, and no step."""
    import runs

    pair = open_data("embedded", "", 0.0, seed=0)
    few = tuple(part.subset(torch.arange(600)) for part in (pair.train, pair.test))
    monkeypatch.setattr(runs, "images", lambda folder, holdout: few)
    settings = (
        "plan=auto", "growth.most=4", "growth.every=0.25", "growth.scales=1e9", "workers.count=128",
        "data.image_size=0", "data.augment=none", "data.drop_last=false",
    )  # fmt: skip
    row = runs.trained(runs.Planned("auto", "sony", 16384, settings), "folder", tiny=True)
    assert "failure" not in row
    assert row["plan"], "the batch has grown"
    assert len(row["noise"]) > 2


def test_what_was_run_stands_in_the_tables() -> None:
    import finished  # type: ignore[import-not-found]
    import ours

    settings = {"settings": ["lr.base=0.24"], "commit": "abc", "seconds": 3.0, "accuracy": 0.941, "steps": 384}
    rows = [{**settings, "name": f"timed sprint epochs 16 seed {seed}", "accuracy_views": 0.95} for seed in range(2)]
    rows += [{"name": each.called, "accuracy": 0.93} for each in finish([ours.search_of("leap")], lambda planned: 0.93)]
    rows += [{**settings, "name": f"converged leap 16384 seed {seed}", "seed": seed} for seed in range(3)]
    text = "\n".join(finished.tables(rows))
    assert "one view: mean 94.10 %" in text
    assert "six views: mean 95.00 %" in text
    assert "median 3.00, 3.00 to 3.00 (n=2)" in text
    assert "| leap | rate 0.24: 93.00, rate 0.12: 93.00" in text
    assert "94.10 ± 0.00 (n=3)" in text


def test_a_search_with_a_run_that_failed_or_had_other_steps_stands_in_the_tables() -> None:
    path = Path(__file__).parent.parent / "benchmarks" / "cifar10" / "summary.py"  # benchmarks/huge has one too
    spec = importlib.util.spec_from_file_location("cifar10_summary", path)
    assert spec is not None
    assert spec.loader is not None
    summary = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(summary)

    rows = [
        {"name": f"search sony 16384 rate {rate} seed 0", "accuracy": accuracy, "seconds": 5.0, "steps": steps}
        for rate, accuracy, steps in ((3, 0.90, 170), (6, 0.91, 170), (12, 0.92, 202))
    ]
    rows.append({"name": "search sony 16384 rate 24 seed 0", "accuracy": None, "failure": "the loss is not finite"})
    assert summary.search_table(rows)[2:] == [
        "| sony | 16,384 | 3: 90.00, **6: 91.00**, 24: 0.00 | 170 | 5.0 |",
        "| sony | 16,384 | **12: 92.00**, 24: 0.00 | 202 | 5.0 |",
    ]
