"""The local validation: its grid, its predictions, and one real run on shaped links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigstep.errors import DataError
from bigstep.lab.cases import case, networks
from bigstep.lab.crossover import find_crossovers
from bigstep.lab.hosts import burst_bytes, why_no_lab
from bigstep.lab.machine import PAYLOAD, UNLIMITED, as_cluster, describe_run, own_times, with_constants
from bigstep.lab.measure_on_host import Host
from bigstep.lab.validate import validate_local
from bigstep.plan.local import compare_runs, crossing_rate, predict_run

MACHINE: dict[str, Any] = {
    "collectives": {
        name: {"latency_us": 200.0, "copy_gbyte_s": 1.0}
        for name in ("ring", "halving", "torus", "hierarchical", "gather")
    },
    "codecs": {name: {"encode_gbyte_s": 0.3, "decode_gbyte_s": 0.8} for name in ("fp16", "bf16", "onebit")},
    "workloads": {},
    "free": {},
    "cores": 4,
    "ranks": 4,
}
OWN = {
    f"{model}, 4 MB, {way}": {"compute_s": {"mlp": 0.002, "resnet9": 0.1}[model]}
    for model in ("mlp", "resnet9")
    for way in ("ring none", "halving none", "torus none", "hierarchical none", "gather onebit")
}


def measured_runs() -> list[dict[str, Any]]:
    runs = [describe_run(network, case, [[1.0]]) for network, cases in networks(quick=False) for case in cases]
    return [with_constants(run, MACHINE, OWN) for run in runs]


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
    expected = 2 * 4 * 269322 * 3 / 4 / (50e6 / 8 * PAYLOAD)
    # 2 ms of compute and 1.2 ms of rounds are less than what a burst of 65536 bytes saves (10 ms)
    assert predict_run(run, as_cluster(MACHINE)) == pytest.approx(expected, rel=1e-6)


def test_a_pause_of_each_level_saves_a_burst() -> None:
    run = next(r for r in measured_runs() if r["name"] == "mlp, 4 hosts, torus none, 50mbit 200mbit inside")
    smooth = predict_run(run | {"burst_byte": 0, "inside_burst_byte": 0}, as_cluster(MACHINE))
    # between nodes once a step; inside while the other level works, and again during 2 ms of compute and 0.8 of rounds
    saved = 69_000 / (50e6 / 8) + 2 * 69_000 / (200e6 / 8)
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


def test_a_measured_crossing_lies_where_the_curves_meet_and_has_an_error() -> None:
    """dense = 5 ms + 1 s / rate, 1-bit = 15 ms: they meet at 100 Mbit/s."""
    shared = {"kind": "sync", "model": "mlp", "bucket_mb": 4.0, "local_batch": 16, "world": 2, "ranks_per_node": 1}
    runs = [
        shared | {"name": f"{collective} at {rate}", "collective": collective, "codec": codec, "rate_mbit_s": rate,
                  "compute_s": 0.01, "seconds": 0.005 + 1 / rate if codec == "none" else 0.015}
        for rate in (60.0, 90.0, 110.0, 160.0)
        for collective, codec in (("ring", "none"), ("gather", "onebit"))
    ]  # fmt: skip
    (found,) = find_crossovers(runs, as_cluster(MACHINE))
    # straight in log-log between 90 and 110 Mbit/s, which is a little off the curve 1 / rate
    assert found["measured_mbit_s"] == pytest.approx(100, rel=2e-3)
    assert found["error"] == pytest.approx(found["predicted_mbit_s"] / found["measured_mbit_s"] - 1)
    meeting = found["predicted_mbit_s"]
    there = {"rate_mbit_s": meeting, "burst_byte": burst_bytes(f"{meeting:.6f}mbit")}
    dense, onebit = (predict_run(run | there, as_cluster(MACHINE)) for run in runs[:2])
    assert dense == pytest.approx(onebit, rel=1e-6)


LAYERS = [{"name": "only", "shapes": [[1000, 1000]], "forward_us": 10_000, "backward_us": 20_000}]
ONE = {"name": "one", "measured_batch": 16, "optimizer_us": 30_000, "layers": LAYERS}
SLOW = {"name": "slow", "kind": "sync", "model": "mlp", "world": 2, "rate_mbit_s": 100.0, "seconds": 1.0,
        "local_batch": 16, "bucket_mb": 4.0, "codec": "none", "collective": "ring"}  # fmt: skip


def test_what_follows_the_last_gradient_waits_for_the_exchange() -> None:
    """One bucket on slow links: step = forward + backward + exchange + what follows."""
    run = SLOW | {"workload": ONE, "compute_s": 0.06}
    exchange = 4e6 / (100e6 / 8 * PAYLOAD) + 2 * 200e-6
    assert predict_run(run, as_cluster(MACHINE)) == pytest.approx(0.060 + exchange, rel=1e-9)
    # 10 ms more, which come with the exchange, lengthen the backward pass
    assert predict_run(run | {"compute_s": 0.07}, as_cluster(MACHINE)) == pytest.approx(0.070 + exchange, rel=1e-9)


def test_what_the_last_exchange_took_beyond_its_prediction_stays_behind_it_on_slow_links() -> None:
    """Two buckets; on slow links the first is ready after forward and half of backward, then comes everything sent."""
    twice = ONE | {"layers": LAYERS * 2}
    free = SLOW | UNLIMITED | {"seconds": 0.130, "exposed_s": 0.025, "in_flight": True}
    machine = MACHINE | {"workloads": {"mlp, 4 MB": twice}, "free": {"mlp, 4 MB, ring none": free}}
    own = own_times(machine)["mlp, 4 MB, ring none"]
    one_bucket = 2 * 200e-6 + 4e6 / 1e9  # copied at 1 GB/s
    assert own["after_s"] == pytest.approx(0.030 + 0.025 - one_bucket)
    forward, backward = 0.020, 0.130 - 0.025 - 0.030 - 0.020
    run = with_constants(SLOW | {"in_flight": True}, machine, own_times(machine))
    sent = (
        2 * 4e6 / (100e6 / 8 * PAYLOAD) + 2 * 200e-6
    )  # the rounds of the first bucket wait beside bytes of the second
    expected = forward + backward / 2 + sent + own["after_s"]
    assert predict_run(run, as_cluster(machine)) == pytest.approx(expected, rel=1e-9)
    assert predict_run(run | UNLIMITED, as_cluster(machine)) == pytest.approx(0.130, rel=1e-9)


def test_ranks_that_share_cores_exchange_cheaper_where_they_wait_for_links() -> None:
    crowded = MACHINE | {"cores": 2}
    assert as_cluster(crowded).collectives["ring"].latency_s == pytest.approx(100e-6)
    assert as_cluster(MACHINE).collectives["ring"].latency_s == pytest.approx(200e-6)
    # and no slower link makes a step shorter than it was on unlimited ones
    run = SLOW | {"workload": ONE, "compute_s": 0.06, "free_s": 0.3}
    assert predict_run(run, as_cluster(crowded)) == pytest.approx(0.060 + 4e6 / (100e6 / 8 * PAYLOAD) + 2 * 100e-6)
    assert predict_run(run | {"rate_mbit_s": 1e4}, as_cluster(crowded)) == 0.3


def take_turns() -> Any:
    each = case("ring", "none", steps=2)
    host = Host()
    found = host.run({"kind": "turns", "count": 3, "groups": [[each], [each, {"kind": "links", "commands": [[], []]}]]})
    host.close()
    return found


def test_cases_are_repeated_in_turns(world: Any) -> None:
    for found in world(2).run(take_turns):
        assert [[len(steps) for steps in group] for group in found] == [[6], [6, 0]]
        # the end of an exchange may be noted a moment after the step has gone on, hence in the next one
        assert 0 < sum(exposed for _, exposed in found[0][0]) < sum(seconds for seconds, _ in found[0][0])


def test_what_was_measured_is_predicted_again_from_the_file(tmp_path: Path) -> None:
    plain = [with_constants(run, MACHINE, {}) for run in measured_runs()]
    runs = [run | {"seconds": predict_run(run, as_cluster(MACHINE)) * 1.02} for run in plain]
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"runs": runs, "machines": dict.fromkeys(("2x1", "3x1", "4x1", "4x2"), MACHINE)}))
    result = validate_local(tmp_path / "result.json", measured=measured)
    assert result["summary"]["mean_error"] == pytest.approx(1 - 1 / 1.02)
    # with the constants above 1-bit stops paying somewhere between the rates of the grid, which are an octave apart
    crossing = next(found for found in result["crossovers"] if found["world"] == 2 and found["model"] == "resnet9")
    assert crossing["measured_mbit_s"] == pytest.approx(crossing["predicted_mbit_s"], rel=0.1)
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
