"""Run folders: what is written comes back, and what is torn does no harm."""

from __future__ import annotations

import fcntl
import json
import math
import threading
import tracemalloc
from pathlib import Path

import pytest

from bigstep.errors import ConfigError, DataError
from bigstep.records import FORMAT, RunWriter, in_use, locked, median_of_last_epochs, read_run, write_atomically


def row(step: int) -> dict[str, float | str]:
    return {"kind": "train", "step": step, "loss": 1.0 / step}


def test_rows_and_facts_come_back(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", {"recipe": "plain"}, ranks=2)
    writer.add([row(1), row(2)])
    writer.note("a remark")
    writer.finish({"accuracy": 0.9})
    run = read_run(tmp_path / "run")
    assert run.config == {"recipe": "plain"}
    assert [each["step"] for each in run.train] == [1, 2]
    assert run.notes == ["a remark"]
    assert run.result == {"accuracy": 0.9}
    assert run.facts["ranks"] == 2
    assert run.facts["versions"]["bigstep"]


def test_a_loss_that_is_not_finite_is_valid_json(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    writer.add([{"kind": "train", "step": 1, "loss": math.nan}])
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line)["loss"] is None
    assert "NaN" not in line


def test_a_run_is_complete_however_many_remarks_end_it(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {"epochs": 2})
    writer.add([{"kind": "eval", "step": 20, "epoch": 2.0, "accuracy": 0.5}])
    for remark in ("one", "two", "three"):
        writer.note(remark)
    writer.finish({"accuracy": 0.5})
    assert read_run(tmp_path).complete


def test_rows_of_somebody_else_do_not_stop_a_run_from_going_on(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {"epochs": 2})
    writer.add([row(1), {"kind": "mine", "step": "one", "epoch": []}, {"kind": "mine", "step": None, "epoch": "2"}])
    writer.finish({"accuracy": 0.5})
    assert not read_run(tmp_path).complete
    RunWriter(tmp_path, {}, keep_until_step=1).close()
    assert len(read_run(tmp_path).rows) == 3


def test_a_report_that_asks_whether_a_run_goes_on_is_not_taken_for_another_run(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open("rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        leaving = threading.Timer(0.1, fcntl.flock, (asking, fcntl.LOCK_UN))
        leaving.start()
        with locked(tmp_path):
            assert in_use(tmp_path)
        leaving.join()


def test_going_on_drops_rows_that_will_come_again(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    writer.add([row(1), row(2), row(3)])
    writer.close()
    again = RunWriter(tmp_path, {}, keep_until_step=2)
    again.add([row(3)])
    again.close()
    assert [each["step"] for each in read_run(tmp_path).train] == [1, 2, 3]


def evaluation(epoch: float, accuracy: float | None) -> dict[str, float | str | None]:
    return {"kind": "eval", "step": int(10 * epoch), "epoch": epoch, "accuracy": accuracy}


def test_the_last_five_epochs_are_those_of_the_whole_run_however_often_it_was_resumed(tmp_path: Path) -> None:
    accuracies = [0.1, 0.9, 0.2, 0.3, 0.8, 0.4, 0.7]  # of the last five the middle one is 0.4
    writer = RunWriter(tmp_path, {})
    writer.add([evaluation(epoch, accuracy) for epoch, accuracy in enumerate(accuracies[:5], 1)])
    writer.close()
    again = RunWriter(tmp_path, {}, keep_until_step=40)  # the fifth comes again
    again.add([row(41), *(evaluation(epoch, accuracy) for epoch, accuracy in enumerate(accuracies[4:], 5))])
    again.close()
    assert median_of_last_epochs(again.evaluations) == 0.4
    assert median_of_last_epochs(read_run(tmp_path).evaluations) == 0.4


def test_evaluations_without_an_accuracy_and_half_epochs_count_as_they_should() -> None:
    halves = [evaluation(epoch / 2, epoch / 100) for epoch in range(1, 21)]  # ten epochs, the last five are 11 to 20
    assert median_of_last_epochs(halves) == pytest.approx(0.155)
    assert median_of_last_epochs([evaluation(1, None), evaluation(2, 0.5)]) == 0.5
    assert median_of_last_epochs([evaluation(1, None)]) is None


def test_a_row_torn_by_a_kill_is_left_out(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    writer.add([row(1)])
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert len(read_run(tmp_path).train) == 1


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, {})
    writer.close()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train"}\nnonsense\n{"kind": "train"}\n')
    with pytest.raises(DataError, match="line 2"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": "x"}', f'{{"format": {FORMAT + 1}}}'])
def test_a_folder_that_cannot_be_read_says_why(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DataError):
        read_run(tmp_path)


def test_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        read_run(tmp_path / "nothing")


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be written"):
        RunWriter(tmp_path / "file" / "run", {})
    assert (tmp_path / "file").read_text() == "mine"


def test_atomic_write_replaces_whole_files_and_leaves_no_parts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_reading_a_long_run_takes_little_more_memory_than_its_rows(tmp_path: Path) -> None:
    columns = ("step", "epoch", "samples", "lr", "loss", "images_per_s", "seconds", "compute_s", "exchange_s", "data_s")
    writer = RunWriter(tmp_path, {})
    writer.add({"kind": "train", **{name: 0.123456789 * step for name in columns}} for step in range(1, 10_001))
    writer.close()
    tracemalloc.start()
    rows = read_run(tmp_path).rows
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 10_000
    # ten numbers of 24 bytes and a table of 16 places are 700 bytes a row here; names of its own would be 550 more, and
    # a list of all lines, held beside the rows, 300
    assert peak / len(rows) < 900
