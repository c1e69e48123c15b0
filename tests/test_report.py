"""Reports from records: grouping over seeds, tables and terminal output."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigstep.errors import DataError
from bigstep.records import RunWriter, read_run
from bigstep.report.charts import charts_of
from bigstep.report.compare import group_runs
from bigstep.report.gather import gather
from bigstep.report.outcome import outcome_of
from bigstep.report.series import group_line
from bigstep.report.study import Study, study_of
from bigstep.report.table import as_rows, standings_of, to_csv, to_markdown

GARBAGE: list[Any] = [None, "text", [], {}, True, -1, 1e308, [[]], {"a": None}]
PUBLISHED = {
    "system": "Example", "source": "Somebody et al., A Paper, 2018, arXiv 1811.05233", "hardware": "2,176 Tesla V100",
    "batch": "34K to 68K", "accuracy": 0.7503, "seconds": 224.0, "note": "Grows its batch.",
}  # fmt: skip


def write_run(
    folder: Path,
    *,
    recipe: str = "plain",
    seed: int = 0,
    top: float | None = 0.88,
    epochs: int = 4,
    local_batch: int = 128,
    ranks: int = 2,
    finished: bool = True,
    diverged: bool = False,
    published: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    result: dict[str, Any] | None = None,
) -> Path:
    """Write the records of a run that never was: ten steps and one evaluation an epoch."""
    batch = 8 * local_batch
    settings = {
        "recipe": recipe, "preset": "mini", "model": "small", "data": {"name": "embedded", "path": ""},
        "workers": {"count": 8, "local_batch": local_batch}, "plan": [], "epochs": epochs,
        "lr": {"base": 0.1}, "checkpoint": {"every": 1.0}, "seed": seed, **(config or {}),
    }  # fmt: skip
    writer = RunWriter(folder, settings, ranks=ranks, device="cpu", published=published)
    rows: list[dict[str, Any]] = []
    for step in range(1, 10 * epochs + 1):
        shared = {"step": step, "epoch": step / 10, "samples": batch * step, "seconds": 0.5 * step}
        loss = None if diverged else 2.3 / step
        rows.append(
            {"kind": "train", **shared, "loss": loss, "lr": 0.1, "batch": batch, "images_per_s": 2.0 * batch,
             "compute_s": 0.4, "exchange_s": 0.06, "data_s": 0.04, "bytes_sent": 1_000 * ranks}
        )  # fmt: skip
        if step % 10 == 0 and top is not None:
            accuracy = top - 0.4 * (1 - step / 10 / epochs)
            rows.append({"kind": "eval", **shared, "accuracy": accuracy, "eval_loss": 1 - accuracy})
    writer.add(rows)
    writer.note("a remark")
    told = {"accuracy": top, "loss": 0.4, "seconds": 5.0 * epochs, "steps": 10 * epochs, "ranks": ranks,
            "samples": 10 * epochs * batch, "batch": batch, "workers": 8, "weights_sha256": "ab" * 32}  # fmt: skip
    if finished:
        writer.finish({**told, **(result or {})})
    writer.close()
    return folder


def study(folder: Path) -> Study:
    return study_of(gather([folder]))


def text_of(study: Study) -> str:
    return " ".join([study.title, *study.sentences()])


# ---- telling apart ----


def test_identical_recipes_under_two_names_are_not_distinguishable(tmp_path: Path) -> None:
    for seed in range(3):
        for name in ("one", "other"):
            write_run(tmp_path / f"{name}-{seed}", recipe=name, seed=seed, top=0.88 + 0.002 * seed)
    found = study(tmp_path)
    assert found.title == "2 ways to train that cannot be told apart"
    assert "Not distinguishable from it with these seeds: other." in text_of(found)


def test_planted_differences_stand_in_the_summary(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"good-{seed}", recipe="good", seed=seed, top=0.88 + 0.001 * seed)
        write_run(tmp_path / f"hot-{seed}", recipe="hot", seed=seed, top=0.1, diverged=True)
        write_run(tmp_path / f"half-{seed}", recipe="half", seed=seed, top=0.84 + 0.001 * seed, epochs=2)
    said = text_of(study(tmp_path))
    assert "good leads with 88.10 %" in said
    assert "Behind it by more than the seeds explain: half and hot." in said
    assert "More than 5 points behind: hot (10.00 %)." in said
    assert "3 runs diverged or did not finish: hot." in said
    assert "most groups saw 40,960 samples, but half (20,480) did not" in said


# ---- grouping ----


def test_groups_are_named_by_what_sets_them_apart(tmp_path: Path) -> None:
    for seed in range(2):
        for local in (32, 128):
            place = tmp_path / f"{local}-{seed}"
            write_run(place, seed=seed, local_batch=local, config={"data": {"name": "embedded", "path": str(seed)}})
    groups = study(tmp_path).groups
    assert sorted(group.label for group in groups) == ["plain · batch 1,024", "plain · batch 256"]
    assert [group.n for group in groups] == [2, 2], "seed and data.path make no new group"


def test_ranks_make_groups_of_their_own(tmp_path: Path) -> None:
    for ranks in (1, 2):
        write_run(tmp_path / str(ranks), ranks=ranks)
    assert sorted(group.label for group in study(tmp_path).groups) == ["plain · ranks 1", "plain · ranks 2"]


def test_a_run_that_hardly_began_says_nothing_of_speed(tmp_path: Path) -> None:
    for ranks in (1, 2):
        write_run(tmp_path / str(ranks), ranks=ranks, local_batch=64 * ranks)
    assert "times as fast on 2 ranks" in text_of(study(tmp_path))
    assert "scaling" in {chart.key for chart in charts_of(study(tmp_path))}
    write_run(tmp_path / "short", ranks=4, result={"steps": 1})
    assert "on 4 ranks" not in text_of(study(tmp_path))
    for ranks in (1, 2):
        shutil.rmtree(tmp_path / str(ranks))
        write_run(tmp_path / str(ranks), ranks=ranks, result={"steps": 4})
    assert "times as fast" not in text_of(study(tmp_path))
    assert "scaling" not in {chart.key for chart in charts_of(study(tmp_path))}


def test_the_leader_on_other_data_is_not_level_with_the_first(tmp_path: Path) -> None:
    write_run(tmp_path / "here", top=0.9)
    write_run(tmp_path / "there", top=0.5, config={"data": {"name": "cifar10", "path": ""}})
    both = study(tmp_path)
    assert len(both.leaders) == 2
    assert both.peers("alike") == []


def test_labels_stay_different_when_too_much_differs(tmp_path: Path) -> None:
    for number in range(3):
        config = {f"setting{k}": f"{'x' * 40}{number}" for k in range(5)}
        write_run(tmp_path / str(number), config=config)
    labels = [group.label for group in study(tmp_path).groups]
    assert len(set(labels)) == 3
    assert all(label.count("·") == 1 for label in labels), "one setting is enough to tell them apart"


def test_a_repeated_seed_counts_once(tmp_path: Path) -> None:
    for copy in range(3):
        write_run(tmp_path / str(copy), seed=7, top=0.8 + 0.01 * copy)
    (group,) = study(tmp_path).groups
    assert group.n == 1
    assert group.median == pytest.approx(0.81)


def test_a_run_that_was_cut_short_is_not_taken_for_a_repeat_of_the_whole_one(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", top=0.88)
    for name in ("a", "b"):
        write_run(tmp_path / name, top=0.15, epochs=1, config={"epochs": 4})  # --steps 10
    found = study(tmp_path)
    assert [(group.label, group.scores) for group in found.groups] == [("plain", [0.88]), ("plain · steps 10", [0.15])]


def test_what_has_not_ended_counts_only_where_nothing_has(tmp_path: Path) -> None:
    write_run(tmp_path / "stopped", epochs=1, config={"epochs": 4}, top=0.2, finished=False)
    alone = study(tmp_path)
    assert alone.groups[0].scores == [pytest.approx(0.2)]
    write_run(tmp_path / "whole", top=0.88)
    (group,) = study(tmp_path).groups
    assert group.scores == [0.88]
    assert group.median_of("samples") == 4 * 10 * 1_024
    assert group.seconds_to(0.87) == 20.0
    assert group.failures == 1


def test_speeds_and_results_of_other_models_and_data_make_no_curve(tmp_path: Path) -> None:
    write_run(tmp_path / "one", ranks=1)
    write_run(tmp_path / "other", ranks=2, local_batch=512, config={"model": "gpt", "data": {"name": "text"}})
    found = study(tmp_path)
    assert "times as fast" not in text_of(found)
    assert not {"scaling", "against-batch"} & {chart.key for chart in charts_of(found)}
    write_run(tmp_path / "again", ranks=2, local_batch=256)
    found = study(tmp_path)
    assert "plain is 2.00 times as fast on 2 ranks (100 % of ideal) as on 1." in text_of(found)
    assert {"scaling", "against-batch"} <= {chart.key for chart in charts_of(found)}


def test_one_seed_has_no_range(tmp_path: Path) -> None:
    for name, top in (("a", 0.8), ("b", 0.7)):
        write_run(tmp_path / name, recipe=name, top=top)
    assert "a has the highest median accuracy, 80.00 % (1 seed), 10.00 points above b." in text_of(study(tmp_path))
    write_run(tmp_path / "a1", recipe="a", seed=1, top=0.81)
    assert "80.50 % (range 1.00 points over 2 seeds)" in text_of(study(tmp_path))


def test_most_groups_saw_only_what_two_did(tmp_path: Path) -> None:
    for name, epochs in (("a", 4), ("b", 2)):
        write_run(tmp_path / name, recipe=name, epochs=epochs)
    assert "Not on equal terms: samples seen: a 40,960 and b 20,480." in text_of(study(tmp_path))
    write_run(tmp_path / "c", recipe="c")
    assert "most groups saw 40,960 samples, but b (20,480) did not." in text_of(study(tmp_path))


def test_time_to_target_is_the_first_evaluation_there(tmp_path: Path) -> None:
    outcome = outcome_of(read_run(write_run(tmp_path / "run", top=0.88)))
    # evaluations at 5, 10, 15, 20 s reach 0.58, 0.68, 0.78, 0.88
    assert outcome.seconds_to(0.7) == 15.0
    assert outcome.seconds_to(0.9) is None
    (group,) = group_runs([outcome])
    assert group.seconds_to(0.7) == 15.0
    assert study_of([outcome.run]).target == 0.87


def test_the_time_to_target_needs_more_than_half_of_the_runs(tmp_path: Path) -> None:
    for seed, top in enumerate((0.6, 0.6, 0.9)):
        write_run(tmp_path / str(seed), seed=seed, top=top)
    (group,) = study(tmp_path).groups
    assert group.seconds_to(0.85) is None
    assert group.seconds_to(0.55) is not None


def test_the_time_to_target_is_not_that_of_the_runs_alone_that_reached_it(tmp_path: Path) -> None:
    """Evaluations come every 5 s, and the last three add 10 points each."""
    for seed, top in enumerate((0.98, 0.9, 0.5)):
        write_run(tmp_path / str(seed), seed=seed, top=top)
    (group,) = study(tmp_path).groups
    assert group.seconds_to(0.75) == 15.0, "the middle one of 10 s, 15 s and never"


def test_the_loss_of_a_run_is_that_of_training_whether_it_has_ended_or_not(tmp_path: Path) -> None:
    found = study_of([read_run(write_run(tmp_path / "run", finished=False))])
    (row,) = as_rows(found)
    assert row["loss"] == 2.3 / 40, "an evaluation's stands beside none of another run's training"


def test_what_a_failed_run_came_to_is_no_figure_of_its_group(tmp_path: Path) -> None:
    write_run(tmp_path / "whole")
    folder = write_run(tmp_path / "failed", seed=1, epochs=1, config={"epochs": 4}, finished=False)
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "bench": {"label": "plain", "failure": "No memory."}}))
    (group,) = study(tmp_path).groups
    assert (group.n, group.failures) == (1, 1)
    assert group.median_of("seconds") == 20.0
    (alone,) = study_of([read_run(folder)]).groups
    assert alone.median_of("seconds") == 5.0


def test_the_split_of_time_is_per_thousand_images(tmp_path: Path) -> None:
    outcome = outcome_of(read_run(write_run(tmp_path / "run")))
    assert outcome.per_1000 == pytest.approx({"compute": 400 / 1024, "exchange": 60 / 1024, "data": 40 / 1024})
    assert outcome.bytes_sent == 2_000 * 40


# ---- curves ----


def test_a_group_is_drawn_as_the_median_of_its_seeds_and_their_range(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(s), seed=s, top=0.8 + 0.01 * s)) for s in range(3)]
    line = group_line([outcome_of(run) for run in runs], "evaluations", "epoch", "accuracy", 100)
    assert line is not None
    assert line.x == [1, 2, 3, 4]
    assert line.y == pytest.approx([0.51, 0.61, 0.71, 0.81])
    assert line.low == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert line.high == pytest.approx([0.52, 0.62, 0.72, 0.82])


def test_a_run_that_stopped_early_counts_only_as_far_as_it_came(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(e), epochs=e, top=0.4 + 0.1 * e)) for e in (2, 4)]
    line = group_line([outcome_of(run) for run in runs], "train", "epoch", "loss", 1000)
    assert line is not None
    assert line.x[-1] == 4
    assert line.low[-1] == line.high[-1] == pytest.approx(2.3 / 40, rel=1e-4)  # five digits are kept


def test_the_short_last_batch_of_an_epoch_is_no_change_of_batch(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    for row in run.rows:
        if row["kind"] == "train" and row["step"] % 10 == 0:
            row["batch"] = 100
    line = group_line([outcome_of(run)], "train", "epoch", "batch", 1000)
    assert line is not None
    assert set(line.y) == {1024}


# ---- gathering ----


def test_folders_of_runs_are_searched_and_each_run_is_read_once(tmp_path: Path) -> None:
    first = write_run(tmp_path / "deep" / "er" / "a")
    write_run(tmp_path / "b", seed=1)
    assert len(gather([tmp_path, first, first.parent])) == 2


def test_a_broken_run_among_others_is_left_out_and_told(tmp_path: Path) -> None:
    sound = write_run(tmp_path / "sound")
    broken = write_run(tmp_path / "broken")
    (broken / "run.json").write_text("{")
    told: list[str] = []
    assert [run.folder for run in gather([tmp_path], told.append)] == [sound]
    assert told == [f"Left out: {broken / 'run.json'} is not valid JSON."]
    with pytest.raises(DataError, match="not valid JSON"):
        gather([sound, broken])  # asked for by name
    (sound / "run.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        gather([tmp_path])  # nothing is left


def test_what_is_no_run_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run folder"):
        gather([tmp_path])
    with pytest.raises(DataError, match="does not exist"):
        gather([tmp_path / "missing"])
    with pytest.raises(DataError, match="at least one run folder"):
        study_of([])


def test_long_runs_are_thinned_but_keep_their_ends_and_evaluations(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=300)
    (run,) = gather([folder])
    full = read_run(folder)
    assert len(full.train) == 3_000
    assert len(run.train) == 2_000
    assert (run.train[0], run.train[-1]) == (full.train[0], full.train[-1])
    assert run.evaluations == full.evaluations
    assert run.notes == full.notes


# ---- rows ----


def test_rows_go_to_json_and_csv_without_loss(tmp_path: Path) -> None:
    write_run(tmp_path / "a", recipe="=cmd|' /C calc'!A0", seed=3, top=0.875)
    write_run(tmp_path / "b", finished=False, top=None)
    runs = gather([tmp_path])
    rows = as_rows(runs)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert rows[0]["accuracy"] == 0.875
    assert (rows[1]["accuracy"], rows[1]["status"]) == (None, "unfinished")
    table = list(csv.DictReader(io.StringIO(to_csv(runs))))
    assert [float(table[0]["accuracy"]), int(table[0]["seed"])] == [0.875, 3]
    assert table[0]["recipe"].startswith("'="), "a spreadsheet must not run it"
    assert table[1]["accuracy"] == ""


def test_markdown_has_a_row_a_group_and_survives_bars_in_names(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", recipe="a|b", seed=seed)
        write_run(tmp_path / f"c{seed}", recipe="c", seed=seed, top=0.5)
    lines = to_markdown(gather([tmp_path])).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert {line.replace("\\|", "").count("|") for line in table} == {10}
    assert "a\\|b" in table[2]


def test_the_median_of_the_last_five_epochs_stands_beside_the_last(tmp_path: Path) -> None:
    write_run(tmp_path / "told", epochs=8, result={"accuracy_last5": 0.77})
    write_run(tmp_path / "older", epochs=8, seed=1)  # a record of before: 0.78 two epochs from the end of 0.88
    found = study(tmp_path)
    assert [row["accuracy_last5"] for row in as_rows(found)] == pytest.approx([0.77, 0.78])
    assert [row["accuracy"] for row in as_rows(found)] == [0.88, 0.88]
    assert standings_of(found)[0]["accuracy_last5"] == pytest.approx(0.775)
    one = text_of(study(tmp_path / "told"))
    assert "88.00 %" in one
    assert "The median of its last five epochs is 77.00 %." in one
    assert "last five" not in text_of(study(write_run(tmp_path / "short", epochs=4)))


def test_reading_records_needs_neither_torch_nor_plotly() -> None:
    code = (
        "import sys, bigstep.report.terminal, bigstep.report.html, bigstep.report.table, bigstep.report.gather;"
        "assert not {'torch', 'plotly', 'jinja2', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
