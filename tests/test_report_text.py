"""Reports about text: bits per byte and perplexity, less is better, tokens counted; other runs keep accuracy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bigstep.records import RunWriter, read_run
from bigstep.report.charts import charts_of
from bigstep.report.gather import gather
from bigstep.report.html import _tiles, render
from bigstep.report.measure import ACCURACY, BITS_PER_BYTE, LOSS
from bigstep.report.study import Study, study_of
from bigstep.report.table import rows_of, standings_of, to_markdown
from bigstep.report.terminal import print_summary
from test_report import text_of, write_run
from test_report_html import page_of

LENGTH, BATCH = 64, 16


def write_text_run(
    folder: Path, recipe: str = "adamw", seed: int = 0, bits: float | None = 2.5, workers: int = 4
) -> Path:
    """Write the records of a run on text that never was: ten steps and one evaluation an epoch, from six bits down."""
    settings = {
        "recipe": recipe, "preset": "mini", "model": "gpt-mini", "data": {"name": "shakespeare", "length": LENGTH},
        "workers": {"count": workers, "local_batch": 4}, "plan": [], "epochs": 4, "lr": {"base": 0.1}, "seed": seed,
    }  # fmt: skip
    writer = RunWriter(folder, settings, ranks=1, device="cpu")
    rows: list[dict[str, Any]] = []
    for step in range(1, 41):
        shared = {"step": step, "epoch": step / 10, "samples": BATCH * step, "seconds": 0.5 * step}
        rows.append({"kind": "train", **shared, "loss": 5.0 / step, "lr": 0.1, "batch": BATCH, "images_per_s": 32.0,
                     "tokens_per_s": 32.0 * LENGTH, "compute_s": 0.4, "exchange_s": 0.0, "data_s": 0.1})  # fmt: skip
        if step % 10 == 0:
            reached = {} if bits is None else {"bits_per_byte": bits + 3.5 * (4 - step / 10) / 3, "perplexity": 6.0}
            rows.append({"kind": "eval", **shared, "accuracy": 0.9 - 0.1 * seed, "eval_loss": 20 / step, **reached})
    writer.add(rows)
    told = {} if bits is None else {"bits_per_byte": bits, "perplexity": 6.0}
    writer.finish({"accuracy": 0.4, "seconds": 20.0, "steps": 40, "samples": 40 * BATCH, "eval_loss": 0.5, **told})
    writer.close()
    return folder


def two_rules(folder: Path) -> Study:
    """Three seeds each of a rule that reaches 2.5 bits and of one that reaches 2.9, and a seed far off."""
    for seed in range(3):
        write_text_run(folder / f"a{seed}", "adamw", seed, 2.5 + 0.01 * seed)
        write_text_run(folder / f"l{seed}", "lamb", seed, 2.9 + 0.01 * seed)
    write_text_run(folder / "s", "sgd", 0, 5.5)
    return study_of(gather([folder]))


def test_one_run_on_text_is_told_in_bits_per_byte_and_tokens(tmp_path: Path) -> None:
    study = study_of(gather([write_text_run(tmp_path / "run")]))
    assert study.measure is BITS_PER_BYTE
    assert study.title == "adamw (mini): 2.500 bits per byte in 20 s"
    told = text_of(study)
    assert "It reached 2.500 bits per byte (a perplexity of 6.00) in 20 s, at 2,048 tokens a second." in told
    assert "%" not in study.title
    charts = {chart.key: chart for chart in charts_of(study)}
    assert {"bits-per-byte-time", "bits-per-byte-samples", "perplexity", "loss"} <= set(charts)
    assert not any("ccuracy" in chart.title + chart.caption for chart in charts.values())
    over_tokens = charts["bits-per-byte-samples"].figure
    assert over_tokens["data"][0]["x"] == [10 * LENGTH * BATCH * epoch for epoch in (1, 2, 3, 4)]
    assert over_tokens["layout"]["xaxis"]["title"]["text"] == "training tokens seen"


def test_the_lowest_bits_lead_and_time_to_a_target_counts_downwards(tmp_path: Path) -> None:
    study = two_rules(tmp_path)
    assert [group.label for group in study.groups] == ["adamw", "lamb", "sgd"]
    assert study.standing(0) == "best"
    assert study.standing(1) == "behind"
    assert study.target == pytest.approx(2.6)
    assert study.groups[0].seconds_to(2.6) == 20.0
    assert study.groups[0].seconds_to(4.0) == 15.0
    assert study.groups[1].seconds_to(2.6) is None
    told = text_of(study)
    assert "adamw has the lowest median of bits per byte, 2.510 (range 0.020 bits over 3 seeds)" in told
    assert "0.400 bits below lamb" in told
    assert "More than 0.5 bits behind: sgd (5.500)." in told
    assert "First to 2.6 bits per byte: adamw, after 20 s." in told


def test_tables_of_text_hold_tokens_a_second(tmp_path: Path) -> None:
    study = two_rules(tmp_path)
    row, standing = rows_of(study)[0], standings_of(study)[0]
    assert (row["bits_per_byte"], row["perplexity"], row["tokens_per_s"]) == (2.5, 6.0, 2048.0)
    assert (standing["measure"], standing["median"], standing["tokens_per_s"]) == ("bits_per_byte", 2.51, 2048.0)
    times = {(each["group"], each["seed"]): each["seconds_to_target"] for each in rows_of(study)}
    assert times["adamw", 0] == times["adamw", 2] == 20.0, "2.6 bits, from above"
    assert times["lamb", 0] is times["sgd", 0] is None
    head, _, first = to_markdown(study).splitlines()[2:5]
    assert "bits per byte (median)" in head
    assert "tokens/s" in head
    assert "| 2.510 | 0.020 bits |" in first
    assert "2,048" in first


def test_the_page_about_text_ranks_from_left_and_marks_what_is_far_off_at_the_right(tmp_path: Path) -> None:
    two_rules(tmp_path)
    page = page_of(gather([tmp_path]), tmp_path)
    figures = json.loads(page.unpack("packed-data"))["figures"]
    low, high = figures["finals"]["layout"]["xaxis"]["range"]
    assert 2.3 < low < 2.5
    assert 2.92 < high < 3.2
    marks = [trace for trace in figures["finals"]["data"] if trace["marker"].get("symbol") == "triangle-right"]
    assert [trace["text"] for trace in marks] == [["5.500 "]]
    assert marks[0]["x"][0] > 2.92
    assert "▸ marks what lies beyond the right edge." in page.text
    assert "Bits per byte" in page.text
    assert "Tokens/s" in page.text
    assert "Accuracy" not in page.text


def test_bits_of_a_recipe_for_images_stand_beside_no_percentage(tmp_path: Path) -> None:
    run = read_run(write_text_run(tmp_path / "run", "sony"))
    run.facts["published"] = {"system": "Sony", "accuracy": 0.7529}
    ((_, beside),) = study_of([run]).published
    assert beside.rows[:3] == (
        ("bits per byte", "2.500", "–"), ("accuracy", "–", "75.29 %"), ("data", "shakespeare", "ImageNet"),
    )  # fmt: skip


def test_recipes_for_images_and_for_text_stand_in_the_same_columns_of_the_page(tmp_path: Path) -> None:
    papers = {
        "adamw": {"system": "Theirs", "batch": "64"},
        "sony": {"system": "Sony", "accuracy": 0.7529, "batch": "34K"},
    }
    runs = [read_run(write_text_run(tmp_path / name, name)) for name in papers]
    for run in runs:
        run.facts["published"] = papers[run.config["recipe"]]
    table = render(study_of(runs)).partition("Recipes and their published results")[2].partition("</table>")[0]
    head, *rows = (re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in table.split("<tr>")[1:])
    assert [len(row) for row in rows] == [len(head)] * 2
    for row in rows:
        told = dict(zip(head, row, strict=True))
        assert told["batch published"] == papers[row[0]]["batch"]
        assert told["accuracy published"] == ("75.29 %" if row[0] == "sony" else "–")


def test_a_terminal_shows_bits_per_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(two_rules(tmp_path))
    shown = capsys.readouterr().out
    assert "bits per byte" in shown
    assert "accuracy" not in shown


def test_images_beside_text_are_compared_by_accuracy_and_tokens_of_one_s_own_by_their_loss(tmp_path: Path) -> None:
    write_text_run(tmp_path / "mixed" / "text")
    write_run(tmp_path / "mixed" / "images")
    assert study_of(gather([tmp_path / "mixed"])).measure is ACCURACY
    own = study_of(gather([write_text_run(tmp_path / "own", bits=None)]))
    assert own.measure is LOSS
    assert own.title == "adamw (mini): a loss of 0.5000 in 20 s"
    assert "eval-loss-time" in {chart.key for chart in charts_of(own)}
    images = study_of(gather([write_run(tmp_path / "images")]))
    assert images.measure is ACCURACY
    assert images.title == "plain (mini): 88.00 % in 20 s"


def test_top5_of_images_is_told_and_text_has_none(tmp_path: Path) -> None:
    images = write_run(tmp_path / "images")
    rows = (images / "metrics.jsonl").read_text().splitlines()
    told = [{**row, "top5": 0.9875} if row["kind"] == "eval" else row for row in map(json.loads, rows)]
    (images / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    study = study_of(gather([images]))
    assert rows_of(study)[0]["top5"] == 0.9875
    assert _tiles(study)[0]["detail"] == "after 4 epochs, top-5 98.75 %"
    text = study_of(gather([write_text_run(tmp_path / "text")]))
    assert rows_of(text)[0]["top5"] is None
    assert "top-5" not in _tiles(text)[0]["detail"]
