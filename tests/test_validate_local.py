"""The local validation: its grid, its predictions, and one real run on shaped links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigstep.bench.lab import why_no_lab
from bigstep.bench.local_grid import networks
from bigstep.bench.local_machine import PAYLOAD, as_cluster, describe_run, with_constants
from bigstep.bench.validate_local import validate_local
from bigstep.errors import DataError
from bigstep.plan.local import compare_runs, crossing_rate, predict_run

MACHINE: dict[str, Any] = {
    "collectives": {
        name: {"latency_us": 200.0, "copy_gbyte_s": 1.0}
        for name in ("ring", "halving", "torus", "hierarchical", "gather")
    },
    "codecs": {name: {"encode_gbyte_s": 0.3, "decode_gbyte_s": 0.8} for name in ("fp16", "bf16", "onebit")},
    "workloads": {},
    "own_s": {
        f"{model} {way}": {"mlp": 0.002, "resnet9": 0.1}[model]
        for model in ("mlp", "resnet9")
        for way in ("ring none", "ring fp16", "halving none", "torus none", "torus fp16", "hierarchical none",
                    "gather onebit", "server none")
    },
}  # fmt: skip


def measured_runs() -> list[dict[str, Any]]:
    runs = [describe_run(network, case, 1.0) for network, cases in networks(quick=False) for case in cases]
    return [with_constants(run, MACHINE) for run in runs]


def test_the_grid_has_fifty_runs_of_every_kind() -> None:
    counted = [run for run in measured_runs() if run["counts"]]
    assert len(counted) >= 50
    assert {run.get("codec") for run in counted} >= {"none", "fp16", "onebit"}
    assert {run.get("collective") for run in counted} >= {"ring", "halving", "torus", "hierarchical", "gather"}
    assert any(run["kind"] == "server" for run in counted)
    assert any(run.get("collective") == "torus" and run["ranks_per_node"] == 2 for run in counted)
    assert len({run["name"] for run in counted}) == len(counted)


def test_every_run_of_the_grid_can_be_predicted() -> None:
    for run in measured_runs():
        assert predict_run(run, as_cluster(MACHINE)) > 0, run["name"]


def test_a_slow_ring_takes_its_bytes_over_its_rate() -> None:
    run = next(r for r in measured_runs() if r["name"] == "mlp, 4 hosts, ring none, 50mbit")
    nbytes, rounds = 4 * 269322, 6
    expected = 2 * nbytes * 3 / 4 / (50e6 / 8 * PAYLOAD) + rounds * 200e-6
    # compute of 2 ms is less than what a burst of 65536 bytes saves (10 ms)
    assert predict_run(run, as_cluster(MACHINE)) == pytest.approx(expected, rel=1e-6)


def test_a_pause_of_each_level_saves_a_burst() -> None:
    run = next(r for r in measured_runs() if r["name"] == "mlp, 4 hosts, torus none, 50mbit 200mbit inside")
    smooth = predict_run(run | {"burst_byte": 0, "inside_burst_byte": 0}, as_cluster(MACHINE))
    # between nodes once a step; inside while the other level works, and again during the 2 ms of compute
    saved = 65536 / (50e6 / 8) + 65536 / (200e6 / 8) + 0.002
    assert smooth - predict_run(run, as_cluster(MACHINE)) == pytest.approx(saved, rel=1e-3)


def test_what_compute_hides_a_burst_cannot_save() -> None:
    run = next(r for r in measured_runs() if r["name"] == "resnet9, 2 hosts, gather onebit, 400mbit")
    slow = run | {"compute_s": 10.0}
    assert predict_run(slow, as_cluster(MACHINE)) >= 10.0


def test_errors_of_runs_that_do_not_count_are_left_out() -> None:
    run = measured_runs()[0]
    exact = run | {"seconds": predict_run(run, as_cluster(MACHINE))}
    wrong = run | {"seconds": 100.0, "counts": False}
    assert compare_runs([exact, wrong], as_cluster(MACHINE))["summary"] == {
        "runs": 1, "mean_error": pytest.approx(0), "worst_error": pytest.approx(0),
    }  # fmt: skip
    with pytest.raises(DataError, match="lacks 'seconds'"):
        compare_runs([{key: value for key, value in run.items() if key != "seconds"}], as_cluster(MACHINE))
    with pytest.raises(DataError, match="no measured runs"):
        compare_runs([], as_cluster(MACHINE))


def test_curves_that_do_not_cross_have_no_crossing() -> None:
    assert crossing_rate([10, 100], [3, 2], [1, 1]) is None
    assert crossing_rate([10, 100], [2, 0.5], [1, 1]) == pytest.approx(10 * 10**0.5)


def test_what_was_measured_is_predicted_again_from_the_file(tmp_path: Path) -> None:
    runs = [run | {"seconds": predict_run(run, as_cluster(MACHINE)) * 1.02} for run in measured_runs()]
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"runs": runs, "machines": dict.fromkeys(("2x1", "3x1", "4x1", "4x2"), MACHINE)}))
    result = validate_local(tmp_path / "result.json", measured=measured)
    assert result["summary"]["mean_error"] == pytest.approx(1 - 1 / 1.02)
    # with the constants above 1-bit stops paying somewhere between the rates of the grid
    crossing = next(found for found in result["crossovers"] if found["hosts"] == 2 and found["model"] == "resnet9")
    assert crossing["measured_mbit_s"] == pytest.approx(crossing["predicted_mbit_s"], rel=1e-6)
    assert json.loads((tmp_path / "result.json").read_text())["summary"] == result["summary"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.netns
def test_real_steps_on_shaped_links_are_near_their_prediction(tmp_path: Path) -> None:
    reason = why_no_lab()
    if reason:
        pytest.skip(reason)
    result = validate_local(tmp_path / "result.json", quick=True)
    # a busy machine stretches steps; on a quiet one the mean is a few percent
    assert result["summary"]["mean_error"] < 0.3
