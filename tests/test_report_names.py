"""Reports: what runs are called, which are compared with which, and who leads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bigstep.errors import nearest
from bigstep.records import locked, read_run
from bigstep.report.command import report_command
from bigstep.report.study import study_of
from bigstep.report.table import standings_of, to_markdown
from bigstep.report.terminal import print_summary
from test_report import study, text_of, write_run


def test_a_setting_that_follows_another_is_no_part_of_a_name(tmp_path: Path) -> None:
    for epochs in (2, 4):
        follows = {"optimizer": {"name": "rmsprop_warmup", "blend_center": epochs / 2, "blend_period": epochs / 4}}
        schedule = {"base": 0.1, "schedule": [{"shape": "warmup", "until": epochs / 4}]}
        write_run(tmp_path / str(epochs), epochs=epochs, config={**follows, "lr": schedule})
    assert sorted(group.label for group in study(tmp_path).groups) == ["plain · epochs 2", "plain · epochs 4"]


def test_a_run_is_called_what_its_user_called_it(tmp_path: Path) -> None:
    for name in ("tuned", "as printed"):
        folder = write_run(tmp_path / name, config={"lr": {"base": len(name)}})
        facts = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**facts, "name": name}))
    assert sorted(group.label for group in study(tmp_path).groups) == ["as printed", "tuned"]


def test_names_that_differ_only_at_their_far_end_are_two_groups(tmp_path: Path) -> None:
    for end in "ab":
        folder = write_run(tmp_path / end)
        facts = json.loads((folder / "run.json").read_bytes())
        (folder / "run.json").write_text(json.dumps({**facts, "name": 100 * "x" + end}))
    first, second = study(tmp_path).groups
    assert second.label == f"{first.label} #2"


def test_the_title_says_how_a_run_ended(tmp_path: Path) -> None:
    assert study(write_run(tmp_path / "a")).title == "plain (mini): 88.00 % in 20 s"
    assert study(write_run(tmp_path / "b", diverged=True)).title == "plain (mini): 88.00 % in 20 s, diverged"
    assert study(write_run(tmp_path / "c", finished=False)).title == "plain (mini): 88.00 % in 20 s, unfinished"


def test_a_run_that_goes_on_has_not_failed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", recipe="done")
    with locked(write_run(tmp_path / "b", recipe="under way", finished=False)):
        assert study(tmp_path / "b").title == "under way (mini): 88.00 % in 20 s, running"
        both = study(tmp_path)
        assert [group.failures for group in both.groups] == [0, 0]
        assert "Still running: under way." in text_of(both)
        assert "did not finish" not in text_of(both)
    assert "1 run diverged or did not finish: under way." in text_of(study(tmp_path))


def test_a_median_of_one_seed_has_no_range(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name)
    assert "The median is 88.00 %." in text_of(study(tmp_path))


def test_nobody_leads_across_data_sets(tmp_path: Path) -> None:
    for name, top in (("embedded", 0.9), ("cifar10", 0.7)):
        for recipe, less in (("one", 0.0), ("two", 0.1)):
            write_run(tmp_path / f"{name}-{recipe}", recipe=recipe, top=top - less, config={"data": {"name": name}})
    found = study(tmp_path)
    assert found.title == "one · embedded leads on embedded and one · cifar10 leads on cifar10"
    said = text_of(found)
    assert "On cifar10, one · cifar10 has the highest median accuracy, 70.00 %." in said
    assert "above" not in said
    assert [standing["standing"] for standing in standings_of(found)] == [
        "best", "too few seeds", "best", "too few seeds",
    ]  # fmt: skip


def test_a_run_that_was_stopped_has_not_failed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", finished=False)
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "stopped": "Stopped by SIGINT after step 40; go on."}))
    write_run(tmp_path / "two", seed=1)
    found = study(tmp_path)
    assert (found.groups[0].failures, found.groups[0].stopped) == (0, 1)
    assert found.standing(0) == "best, 1 stopped"
    assert "ready to continue with --resume: plain." in text_of(found)
    assert "Stopped by SIGINT after step 40" in text_of(study_of([read_run(folder)]))


def test_what_a_technique_brings_is_read_from_facts_whatever_the_label(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"whole-{seed}", recipe="sony", seed=seed, top=0.90 + 0.001 * seed)
        folder = write_run(tmp_path / f"part-{seed}", recipe="sony", seed=seed, top=0.85, config={"plan": [1]})
        facts = json.loads((folder / "run.json").read_text())
        told = {"label": "no growth", "without": "batch-size control"}
        (folder / "run.json").write_text(json.dumps({**facts, "bench": told}))
    (effect,) = study(tmp_path).effects
    assert (effect.system, effect.technique, effect.verdict) == ("sony", "batch-size control", "apart")


def test_a_technique_is_held_to_the_system_of_its_own_suite_where_a_folder_has_several(tmp_path: Path) -> None:
    """`bigstep report bench` finds the recipe in other epochs and batches too, under the same name."""
    for seed in range(3):
        write_run(tmp_path / f"whole-{seed}", recipe="sony", seed=seed, top=0.90 + 0.001 * seed)
        write_run(tmp_path / f"longer-{seed}", recipe="sony", seed=seed, top=0.95, epochs=8)
        write_run(tmp_path / f"larger-{seed}", recipe="sony", seed=seed, top=0.30, local_batch=512)
        folder = write_run(tmp_path / f"part-{seed}", recipe="sony", seed=seed, top=0.85, config={"plan": [1]})
        facts = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**facts, "bench": {"label": "bare", "without": "growth"}}))
    (effect,) = study(tmp_path).effects
    assert effect.brings == pytest.approx(0.901 - 0.85)
    assert effect.costs == pytest.approx(0.0)


def test_json_tells_the_standings(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"good-{seed}", recipe="good", seed=seed, top=0.88 + 0.001 * seed)
        write_run(tmp_path / f"weak-{seed}", recipe="weak", seed=seed, top=0.70 + 0.001 * seed)
    told = report_command([tmp_path], html=None, csv=None, markdown=False, quiet=True)
    assert [(row["group"], row["standing"], row["seeds"]) for row in told["standings"]] == [
        ("good", "best", 3), ("weak", "behind", 3),
    ]  # fmt: skip
    assert told["summary"][0] == "6 runs in 2 groups, 3 seeds each."
    json.dumps(told, allow_nan=False)


def test_one_is_not_written_as_several(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ranks=1, epochs=1)
    write_run(tmp_path / "b", ranks=1, epochs=1)
    assert "over 1 seed" in study(tmp_path).title
    said = text_of(study_of([read_run(tmp_path / "a")]))
    assert "for 1 epoch with" in said
    assert "on 1 rank (" in said
    assert nearest("sony", ["sonny"]) == "did you mean 'sonny'?"


def test_the_summary_says_what_the_leaders_have_in_common(tmp_path: Path) -> None:
    for recipe, local, top in (("one", 4, 0.9), ("two", 4, 0.9), ("three", 128, 0.7), ("four", 128, 0.7)):
        for seed in range(3):
            write_run(
                tmp_path / f"{recipe}-{seed}", recipe=recipe, seed=seed, local_batch=local, top=top + 0.001 * seed
            )
    assert "The 2 leaders share batch 32 (others 1,024)." in text_of(study(tmp_path))


def test_samples_are_called_what_they_are(tmp_path: Path) -> None:
    text = write_run(tmp_path / "text", config={"data": {"name": "shakespeare"}})
    own = write_run(tmp_path / "own", config={"data": {"name": "my_package:data"}})
    assert "sequences a second" in text_of(study_of([read_run(text)]))
    assert "samples a second" in text_of(study_of([read_run(own)]))
    assert "samples/s" in to_markdown([read_run(text), read_run(own)])


def test_runs_with_models_and_data_of_one_s_own_are_told_apart_by_them(tmp_path: Path) -> None:
    for name in ("Regressor", "Ranker"):
        folder = write_run(tmp_path / name)
        facts = json.loads((folder / "run.json").read_text())
        used = {"unit": "samples", "model": name, "data": f"Own ({len(name)} samples)", "loss": "mse_loss"}
        (folder / "run.json").write_text(json.dumps({**facts, "used": used}))
    groups = study(tmp_path).groups
    assert sorted(group.label for group in groups) == [
        "plain · Own (6 samples) · Ranker", "plain · Own (9 samples) · Regressor",
    ]  # fmt: skip
    assert "images" not in text_of(study(tmp_path))


def exact_run(folder: Path, sha: str, **more: Any) -> Path:
    return write_run(folder, config={"exact": True, **more.pop("config", {})}, result={"weights_sha256": sha}, **more)


def test_exact_runs_that_should_be_equal_and_are_not_are_told(tmp_path: Path) -> None:
    exact_run(tmp_path / "one", "ab" * 32, ranks=1)
    exact_run(tmp_path / "three", "ab" * 32, ranks=3, config={"exchange": {"collective": "torus"}})
    said = text_of(study(tmp_path))
    assert "2 exact runs of plain (seed 0) have the same weights in every bit." in said
    exact_run(tmp_path / "seven", "cd" * 32, ranks=7)
    (told,) = [sentence for sentence in study(tmp_path).sentences() if "every bit" in sentence]
    assert "NOT EQUAL: 3 exact runs of plain (seed 0)" in told
    assert "seven on 7 ranks: cdcdcdcdcdcd" in told
    assert "one on 1 rank: abababababab" in told
    assert any("NOT EQUAL" in line for line in report_command(
        [tmp_path], html=None, csv=None, markdown=False, quiet=True)["summary"])  # fmt: skip


def test_runs_that_need_not_be_equal_are_not_accused(tmp_path: Path) -> None:
    exact_run(tmp_path / "base", "ab" * 32)
    exact_run(tmp_path / "other seed", "01" * 32, seed=1)
    exact_run(tmp_path / "longer", "02" * 32, epochs=5)
    exact_run(tmp_path / "other rate", "03" * 32, config={"lr": {"base": 0.2}})
    write_run(tmp_path / "rounded", result={"weights_sha256": "04" * 32})
    write_run(tmp_path / "rounded on 3", ranks=3, result={"weights_sha256": "05" * 32})
    exact_run(tmp_path / "unfinished", "06" * 32, finished=False)
    other = exact_run(tmp_path / "other torch", "07" * 32)
    facts = json.loads((other / "run.json").read_text())
    facts["versions"] = {**facts["versions"], "torch": "9.9"}
    (other / "run.json").write_text(json.dumps(facts))
    assert "every bit" not in text_of(study(tmp_path))


def test_a_name_is_not_broken_where_another_column_has_words_to_break(tmp_path: Path) -> None:
    write_run(tmp_path / "a", recipe="plain", top=0.9)
    write_run(tmp_path / "b", recipe="hogwild", top=0.8, finished=False)
    stream = io.StringIO()
    print_summary(study(tmp_path), Console(file=stream, width=80))
    rows = [line.split() for line in stream.getvalue().splitlines()]
    assert any(row[:1] == ["hogwild"] and "seeds," in row for row in rows), stream.getvalue()


def test_a_group_that_only_failed_makes_no_leader_unsure(tmp_path: Path) -> None:
    for recipe, top in (("plain", 0.9), ("lars", 0.8)):
        for seed in range(3):
            write_run(tmp_path / f"{recipe}-{seed}", recipe=recipe, seed=seed, top=top + 0.002 * seed)
    write_run(tmp_path / "broken", recipe="sony", top=0.3, diverged=True)
    assert study(tmp_path).title == "plain leads with 90.20 %"
    write_run(tmp_path / "whole", recipe="pfn", top=0.89)
    assert study(tmp_path).title == "plain leads with 90.20 %, with too few seeds to be sure"
