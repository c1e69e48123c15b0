"""What a plan proposes: within a budget, from runs that differ by chance, and what would help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigstep.errors import ConfigError
from bigstep.plan import Cluster, Workload, cli_result, render
from bigstep.plan.accuracy import IMAGENET_LARS, fit_law
from bigstep.plan.cluster import CollectiveSpeed
from bigstep.plan.search import explain, fewest_devices, prefer, rank
from bigstep.plan.workload import Layer
from bigstep.records import RunWriter

RESNET = Workload.load("resnet50")


def test_a_budget_finds_the_fewest_devices() -> None:
    answer = cli_result(cluster="dgx_h200", budget_minutes=5)
    assert answer["best"]["minutes"] <= 5
    fewer = cli_result(cluster="dgx_h200", gpus=answer["gpus"] // 2)
    assert fewer["best"]["minutes"] > 5
    node = Cluster.load("dgx_h200").devices_per_node
    assert answer["gpus"] % node == 0
    assert "only 0.2 % less time for an epoch" in answer["recommended"]["why"], "1.00 times as fast says nothing"
    fewer = cli_result(cluster="dgx_h200", gpus=answer["gpus"] - node)
    assert fewer["best"]["minutes"] > 5, "a node less would do"
    with pytest.raises(ConfigError, match="allow more time"):
        cli_result(cluster="mn1", budget_minutes=0.01)


def test_a_budget_takes_no_more_devices_than_were_asked_for() -> None:
    free = cli_result(cluster="dgx_h100", budget_minutes=5)["gpus"]
    assert cli_result(cluster="dgx_h100", budget_minutes=5, gpus=2 * free)["gpus"] == free
    assert cli_result(cluster="dgx_h100", budget_minutes=5, gpus=free)["gpus"] == free
    with pytest.raises(ConfigError, match="any number of devices up to 8; allow more time, more devices"):
        cli_result(cluster="dgx_h100", budget_minutes=1, gpus=8)
    with pytest.raises(ConfigError, match="none is known for gpt-124m; fit one to your own runs with --runs"):
        cli_result(model="gpt-124m", budget_minutes=5)


def test_unequal_shares_and_losses_that_the_first_figure_leaves_out_are_told() -> None:
    assert not cli_result(gpus=64, batch=6400)["warnings"]
    (told,) = cli_result(gpus=64, batch=6420)["warnings"]
    assert "unequal shares" in told
    assert told.endswith("6,400 or 6,464 would divide evenly")
    lost = cli_result(cluster="dgx_h100", gpus=64, lifetime_hours=5)
    way = next(way for way in lost["ways"] if way["method"] == "synchronous")
    assert way["minutes"] > 1.2 * lost["best"]["minutes"], "else there were nothing to tell"
    assert any("never lost" in warning for warning in lost["warnings"])


def test_why_the_first_of_the_ranking_is_not_the_one_to_take_is_told() -> None:
    answer = cli_result(model="gpt-124m", cluster="dgx_h200", gpus=64)
    first, best = answer["ranking"][0], answer["best"]
    assert first["codec"] != best["codec"]
    assert answer["why"][0].startswith(f"The first, {first['codec']}, would take ")
    plain = cli_result(cluster="abci", gpus=64)
    assert plain["ranking"][0] == plain["best"]
    assert plain["why"][0].startswith("Of ")


def test_a_budget_is_kept_with_the_exchange_that_was_asked_for() -> None:
    slow = Cluster.load("dgx_h200").with_bandwidth(125e6)
    ring = fewest_devices(RESNET, slow, 60, law=IMAGENET_LARS, collective="ring", codec="none")
    assert ring
    assert ring.prediction.scheme.collective == "ring"
    assert ring.minutes <= 60


def test_a_whole_cluster_that_is_no_power_of_two_is_tried() -> None:
    cluster = replace(Cluster.load("dgx_h200"), nodes=3)
    whole = prefer(rank(RESNET, cluster, 24, law=IMAGENET_LARS)).minutes
    two = prefer(rank(RESNET, cluster, 16, law=IMAGENET_LARS)).minutes
    assert whole
    assert two
    assert whole < two
    found = fewest_devices(RESNET, cluster, (whole + two) / 2, law=IMAGENET_LARS)
    assert found
    assert found.prediction.devices == 24


def test_what_would_help_counts_the_speed_that_the_model_runs_at() -> None:
    """Of matrix products, which transformers run at; and of a device that was measured, whose times are given."""
    layers = (Layer(name="a", shapes=((1000, 1000),), forward_s=0.1, backward_s=0.2),)
    measured = Workload(name="measured", layers=layers, measured_batch=32, optimizer="sgd")
    for workload in (Workload.load("gpt-124m"), measured):
        choice = rank(workload, Cluster.load("dgx_h200"), 16, collective="ring", codec="none")[0]
        sentence = explain(workload, Cluster.load("dgx_h200"), choice)[1]
        assert "What would help: a device of twice the speed" in sentence, "all of the step is compute"
    speed = CollectiveSpeed(latency_s=0.1)
    cluster = replace(Cluster.load("dgx_h200"), collectives={"ring": speed})
    choice = rank(RESNET, cluster, 16, collective="ring", codec="none")[0]
    assert "What would help: half the latency" in explain(RESNET, cluster, choice)[1]


@pytest.mark.parametrize("points", [[(512, 20.0), (1024, 2.0)], [(512, 1.0), (1024, 10.0)], [(512, 9.0), (1024, 9.0)]])
def test_no_batch_takes_negative_epochs(points: list[tuple[float, float]]) -> None:
    law = fit_law(points, 92.0, "two runs that differ by chance")
    assert all(law.epochs(batch) >= 0 for batch in (1, 64, 512, 1280, 10_000))
    assert law.slope >= 0


def test_a_law_without_a_price_of_size_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for batch in (512, 1024):
        writer = RunWriter(tmp_path / str(batch), {})
        writer.add([{"kind": "train", "step": 1, "batch": batch}, {"kind": "eval", "epoch": 9.0, "accuracy": 0.95}])
        writer.close()
    answer = cli_result(cluster="dgx_h200", gpus=2, law_runs=[tmp_path], target=90)
    render(answer)
    assert "the same number at every batch tried" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("devices", "batch"), [(70_000, 0), (90_000, 200_000)])
def test_a_sweep_answers_as_a_plan_does_where_the_law_ends(devices: int, batch: int) -> None:
    assert devices > IMAGENET_LARS.largest_batch, "beyond the runs of the law"
    answer = cli_result(cluster="dgx_h100", gpus=devices, batch=batch, sweep=f"gpus={devices}..{devices}")
    row = answer["sweep"][0]
    assert (row["batch"], row["epochs"]) == (answer["best"]["batch"], answer["best"]["epochs"])
    with pytest.raises(ConfigError, match="beyond anything known to converge"):
        cli_result(cluster="dgx_h100", sweep="gpus=90000..90000")
