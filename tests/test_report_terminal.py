"""What a report shows in a terminal: one run beside the published result, many side by side, records with surprises."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bigstep.records import Run, read_run
from bigstep.report.gather import gather
from bigstep.report.study import study_of
from bigstep.report.table import to_csv
from bigstep.report.terminal import print_summary
from test_report import GARBAGE, PUBLISHED, write_run


def shown(runs: list[Run], width: int) -> str:
    stream = io.StringIO()
    print_summary(runs, Console(file=stream, width=width))
    return stream.getvalue()


def test_one_run_stands_beside_the_published_result(tmp_path: Path) -> None:
    text = shown([read_run(write_run(tmp_path / "run", published=PUBLISHED))], 100)
    for expected in (
        "88.00 %",
        "75.03 %",
        "34K to 68K",
        "3 min 44 s",
        "2,176 Tesla V100",
        "not comparable",
        "⠉",
        "epoch 4",
    ):
        assert expected in text


def test_the_published_column_names_the_data_of_the_paper(tmp_path: Path) -> None:
    muon = {**PUBLISHED, "data": "CIFAR-10"}
    text = shown([read_run(write_run(tmp_path / "embedded", published=muon))], 100)
    assert "CIFAR-10 in the paper" in text
    assert "ImageNet" not in text
    same = read_run(write_run(tmp_path / "cifar10", published=muon, config={"data": {"name": "cifar10"}}))
    assert "not comparable" not in shown([same], 100)


def test_what_was_made_here_stands_beside_no_paper(tmp_path: Path) -> None:
    text = shown([read_run(write_run(tmp_path / "leap", published={**PUBLISHED, "ours": True}))], 100)
    assert "published result" not in text
    assert "in the paper" not in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_nothing_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    for seed in range(3):
        for recipe in ("a", "quite-a-long-name-of-a-recipe", "b"):
            write_run(tmp_path / f"{recipe}{seed}", recipe=recipe, seed=seed)
    text = shown(gather([tmp_path]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "accuracy" in text


def test_a_hostile_record_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    name = "evil\x1b]0;owned\x07\x1b[2J[bold]"
    write_run(tmp_path / "run", recipe=name, published={**PUBLISHED, "system": name, "source": name})
    write_run(tmp_path / "other", seed=1)
    for runs in (gather([tmp_path]), gather([tmp_path / "run"])):
        text = shown(runs, 100)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[bold]" in text


@pytest.mark.parametrize("value", GARBAGE, ids=repr)
def test_records_with_surprises_still_make_a_report(tmp_path: Path, value: Any) -> None:
    folder = write_run(tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    keys = ("config", "hardware", "versions", "commit", "command", "published", "result", "ranks", "device", "started")
    for key in keys:
        run = Run(folder, {**facts, key: value}, [])
        assert shown([run], 80)
    for column in ("epoch", "samples", "loss", "accuracy", "seconds", "batch", "images_per_s", "compute_s", "step"):
        rows = [{**row, column: value} for row in read_run(folder).rows]
        run = Run(folder, facts, rows)
        assert shown([run, read_run(folder)], 80)
        assert to_csv([run])


def test_a_run_without_rows_says_so() -> None:
    assert "no evaluation recorded" in study_of([Run(Path("x"), {"format": 1}, [])]).title
