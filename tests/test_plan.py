"""The planner: closed forms, published rows, refusals, speed."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bigstep.errors import ConfigError
from bigstep.plan import Cluster, Scheme, Workload, cli_result, predict, render
from bigstep.plan.accuracy import IMAGENET_LARS, MLPERF_EPOCHS, law_from_runs
from bigstep.plan.cluster import cluster_names
from bigstep.plan.cost import exchange_phases, exchange_seconds
from bigstep.plan.crossover import find_crossover
from bigstep.plan.events import Task, run_tasks
from bigstep.plan.scheme import make_buckets
from bigstep.plan.search import rank
from bigstep.plan.server import _services, predict_server, server_bound
from bigstep.plan.simulate import closed_form, expected_maximum, step_tasks
from bigstep.plan.validate import check_rows, summarise
from bigstep.records import RunWriter
from bigstep.tables.codecs import encoded_bytes
from bigstep.tables.collectives import choose_grid, collective_traffic

RESNET = Workload.load("resnet50")
ABCI = Cluster.load("abci")


def flat(nodes: int, **changes: Any) -> Cluster:
    """One device a node, links without losses."""
    mapping = {
        "nodes": nodes,
        "devices_per_node": 1,
        "jitter": 0,
        "device": {"memory_gib": 16, "memory_bandwidth_gbyte_s": 900, "sustained_tflop_s": 10},
        "inside": {"bandwidth_gbyte_s": 50, "latency_us": 3},
        "between": {"bandwidth_gbit_s": 10, "latency_us": 20, "gap_us": 2},
    }
    return Cluster.from_mapping(mapping | changes, "flat")


@pytest.mark.parametrize(("ranks", "grid", "steps"), [(1024, (32, 32), 124), (2048, (64, 32), 188),
                                                      (3456, (72, 48), 236), (4096, (64, 64), 252),
                                                      (2176, (64, 34), 192)])  # fmt: skip
def test_torus_takes_the_papers_rounds_and_a_rings_bytes(ranks: int, grid: tuple[int, int], steps: int) -> None:
    phases = exchange_phases("torus", 51.1e6, ABCI, ranks, grid)
    assert sum(phase.rounds for phase in phases) == steps
    ring = collective_traffic("ring", 51.1e6, ranks)
    assert ring.messages == 2 * (ranks - 1)
    assert sum(phase.bytes_sent for phase in phases) == pytest.approx(ring.bytes_sent, rel=1e-12)


def test_flat_collectives_cost_their_closed_forms() -> None:
    n, N, a, b, gap = 40e6, 16, 20e-6, 8 / 10e9, 2e-6
    cluster = flat(N)
    assert exchange_seconds("ring", n, cluster, N) == pytest.approx(2 * (N - 1) * a + 2 * n * (N - 1) / N * b)
    assert exchange_seconds("halving", n, cluster, N) == pytest.approx(2 * 4 * a + 2 * n * (N - 1) / N * b)
    torus = 2 * 3 * (a + n / 4 * b) + 2 * 3 * (a + n / 16 * b)
    assert exchange_seconds("torus", n, cluster, N, (4, 4)) == pytest.approx(torus)
    gather = 2 * a + 2 * (N - 1) * gap + 2 * n * (N - 1) / N * b
    assert exchange_seconds("gather", n, cluster, N) == pytest.approx(gather)


def test_two_level_collectives_cost_their_closed_forms() -> None:
    n, k, m = 40e6, 4, 8
    a1, b1, a2, b2 = 3e-6, 1 / 50e9, 20e-6, 8 / 10e9
    cluster = flat(m, devices_per_node=k)
    hierarchical = 4 * (k - 1) * (a1 + n / k * b1) + 2 * (m - 1) * (a2 + n / m * b2)
    assert exchange_seconds("hierarchical", n, cluster, k * m) == pytest.approx(hierarchical)
    # a node's k columns share its one adapter
    torus = 2 * (k - 1) * (a1 + n / k * b1) + 2 * (m - 1) * (a2 + n / (k * m) * k * b2)
    assert exchange_seconds("torus", n, cluster, k * m, (k, m)) == pytest.approx(torus)
    four = replace(cluster, adapters_per_node=4)
    spread = 2 * (k - 1) * (a1 + n / k * b1) + 2 * (m - 1) * (a2 + n / (k * m) * b2)
    assert exchange_seconds("torus", n, four, k * m, (k, m)) == pytest.approx(spread)
    assert exchange_seconds("hierarchical", n, four, k * m) == pytest.approx(hierarchical), "a leader has one adapter"


def test_a_single_device_exchanges_nothing() -> None:
    assert exchange_phases("ring", 1e6, ABCI, 1) == []
    alone = predict(RESNET, ABCI, devices=1, local_batch=32)
    assert alone.split["exchange"] == 0
    assert alone.efficiency == pytest.approx(1)


@pytest.mark.parametrize("collective", ["ring", "hierarchical", "torus", "halving", "hybrid", "gather", "switch"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("devices", "bandwidth"), [(2, 1e8), (64, 1e9), (2048, 1.25e10)])
def test_events_equal_the_closed_form(collective: str, overlap: bool, devices: int, bandwidth: float) -> None:
    cluster = ABCI.with_bandwidth(bandwidth)
    codec = "onebit" if collective == "gather" else "fp16"
    for bucket in (1, 25, 1000):
        scheme = Scheme(collective=collective, codec=codec, overlap=overlap, bucket_mb=bucket)
        slowest = 1 + cluster.jitter * expected_maximum(devices)
        expected = closed_form(RESNET, cluster, devices=devices, local_batch=8, scheme=scheme, slowest=slowest)
        found = predict(RESNET, cluster, devices=devices, local_batch=8, scheme=scheme)
        assert found.step_s == pytest.approx(expected, rel=1e-12)
        assert sum(found.split.values()) == pytest.approx(found.step_s, rel=1e-9)


def test_without_overlap_a_step_is_the_sum_of_its_parts() -> None:
    scheme = Scheme(collective="ring", overlap=False, bucket_mb=4)
    tasks = step_tasks(RESNET, flat(8), devices=8, local_batch=8, scheme=scheme)
    assert max(end for _, end in run_tasks(tasks)) == pytest.approx(sum(task.seconds for task in tasks))


def test_a_slow_network_leaves_only_the_first_bucket_waiting() -> None:
    cluster = flat(8).with_bandwidth(1e7)
    scheme = Scheme(bucket_mb=4)
    tasks = step_tasks(RESNET, cluster, devices=8, local_batch=8, scheme=scheme)
    links = sum(task.seconds for task in tasks if task.name == "exchange")
    first_ready = tasks[0].seconds + tasks[1].seconds
    assert max(end for _, end in run_tasks(tasks)) == pytest.approx(first_ready + links + tasks[-1].seconds)


@pytest.mark.parametrize("collective", ["ring", "halving", "gather"])
@pytest.mark.parametrize("bandwidth", [1e7, 1e8, 1e10])
def test_buckets_in_flight_equal_their_closed_form(collective: str, bandwidth: float) -> None:
    cluster = flat(8).with_bandwidth(bandwidth)
    codec = "onebit" if collective == "gather" else "none"
    for bucket in (0.1, 4, 1000):
        scheme = Scheme(collective=collective, codec=codec, bucket_mb=bucket, in_flight=True)
        slowest = 1 + cluster.jitter * expected_maximum(8)
        expected = closed_form(RESNET, cluster, devices=8, local_batch=8, scheme=scheme, slowest=slowest)
        found = predict(RESNET, cluster, devices=8, local_batch=8, scheme=scheme)
        assert found.step_s == pytest.approx(expected, rel=1e-12)


def test_buckets_in_flight_wait_for_the_rounds_of_the_last_one_only() -> None:
    cluster = flat(8).with_bandwidth(1e7)
    in_turn, together = (
        Scheme(collective="halving", bucket_mb=4),
        Scheme(collective="halving", bucket_mb=4, in_flight=True),
    )
    phases = [exchange_phases("halving", 4 * bucket.values, cluster, 8) for bucket in make_buckets(RESNET, 4)]
    rounds = [sum(phase.rounds_s for phase in bucket) for bucket in phases]
    assert rounds[0] == pytest.approx(6 * 20e-6)  # 2 log2 8 rounds of 20 us
    steps = [predict(RESNET, cluster, devices=8, local_batch=8, scheme=scheme).step_s for scheme in (in_turn, together)]
    assert steps[0] - steps[1] == pytest.approx(sum(rounds[:-1]), rel=1e-6)


def test_pipelined_levels_are_never_slower_and_never_faster_than_the_busier_one() -> None:
    cluster = flat(8, devices_per_node=4, inside={"bandwidth_gbyte_s": 2, "latency_us": 3})
    serial = Scheme(collective="torus", bucket_mb=4, grid=(4, 8))
    one = predict(RESNET, cluster, devices=32, local_batch=8, scheme=serial)
    two = predict(RESNET, cluster, devices=32, local_batch=8, scheme=replace(serial, pipelined=True))
    phases = [
        phase
        for bucket in make_buckets(RESNET, 4)
        for phase in exchange_phases("torus", 4 * bucket.values, cluster, 32, (4, 8))
    ]
    busier = max(sum(p.seconds for p in phases if p.level == level) for level in ("inside", "between"))
    assert busier < two.step_s < one.step_s


def test_engine_serves_in_order_and_never_two_at_once() -> None:
    generator = np.random.default_rng(0)
    tasks = [
        Task(str(i), f"r{generator.integers(3)}", float(generator.random()),
             tuple(int(j) for j in generator.choice(i, size=min(i, 2), replace=False)) if i else ())
        for i in range(60)
    ]  # fmt: skip
    times = run_tasks(tasks)
    for task, (start, end) in zip(tasks, times, strict=True):
        assert end == pytest.approx(start + task.seconds)
        assert all(times[before][1] <= start + 1e-12 for before in task.after)
    for resource in ("r0", "r1", "r2"):
        spans = sorted(times[i] for i, task in enumerate(tasks) if task.resource == resource)
        assert all(first[1] <= second[0] + 1e-12 for first, second in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("draws", [1, 2, 8, 256, 4096])
def test_expected_maximum_is_near_the_integral(draws: int) -> None:
    x = np.linspace(-9, 9, 200_001)
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    cumulative = np.cumsum(density) * (x[1] - x[0])
    exact = float(np.sum(x * draws * cumulative ** (draws - 1) * density) * (x[1] - x[0]))
    assert expected_maximum(draws) == pytest.approx(exact, abs=0.03)  # what the docstring promises


def test_parameter_server_reaches_its_bound_and_counts_staleness() -> None:
    cluster = flat(64)
    for workers, servers in ((1, 1), (4, 1), (64, 1), (64, 8)):
        found = predict_server(RESNET, cluster, workers=workers, local_batch=32, servers=servers)
        bound = server_bound(workers, _services(RESNET, cluster, 32, servers, "none"))
        # no queues at 1 worker, no idle server at 64: in between, chance meetings cost a little
        assert found.updates_s == pytest.approx(bound, rel=0.03)
        assert found.staleness <= workers - 1 + 1e-9
    crowded = predict_server(RESNET, cluster, workers=64, local_batch=32)
    assert crowded.staleness > 60
    assert crowded.bottleneck in ("push", "pull")


def test_published_rows_are_met() -> None:
    rows = check_rows()
    summary = summarise(rows)
    assert summary["mean_error"] <= 0.06
    assert summary["worst_error"] <= 0.15
    systems = {row.system.split()[0] for row in rows if row.role == "predicted"}
    assert systems == {"Goyal", "Akiba", "Jia", "Mikami", "Yamazaki", "MLPerf,", "Seide"}
    contradicted = [row for row in rows if row.role == "contradicted"]
    assert contradicted
    assert all(row.note for row in contradicted)


@pytest.mark.parametrize("name", cluster_names())
def test_every_figure_of_a_cluster_has_its_source(name: str) -> None:
    content = yaml.safe_load((Path(sys.modules["bigstep.plan.cluster"].FOLDER) / f"{name}.yaml").read_text())
    figures = {key for key, value in content.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
    for part in ("device", "inside", "between"):
        figures |= {f"{part}.{key}" for key, value in content[part].items() if not isinstance(value, str)}
    assert figures == set(content["sources"])


def test_double_buffering_hides_an_exchange_behind_the_next_step() -> None:
    slow = flat(8, between={"bandwidth_gbit_s": 1, "latency_us": 20})
    plain = Scheme(collective="gather", codec="onebit", bucket_mb=1000, overlap=False)
    for local_batch in (1, 256):  # the exchange is longer, and shorter, than what a device does
        alone = predict(RESNET, slow, devices=8, local_batch=local_batch, scheme=plain)
        double = predict(RESNET, slow, devices=8, local_batch=local_batch, scheme=replace(plain, double_buffer=True))
        own = alone.step_s - alone.exchange_s
        assert double.step_s == pytest.approx(max(own, alone.exchange_s))
        assert (own > alone.exchange_s) == (local_batch == 256)
        assert (double.bytes_sent, double.batch) == (alone.bytes_sent, alone.batch)  # a step is one exchange
        assert sum(double.split.values()) == pytest.approx(double.step_s)


def test_double_buffering_does_not_outrun_the_input() -> None:
    fed = replace(flat(8, between={"bandwidth_gbit_s": 1, "latency_us": 20}), loader_samples_s=10.0)
    scheme = Scheme(collective="gather", codec="onebit", bucket_mb=1000, double_buffer=True)
    double = predict(RESNET, fed, devices=8, local_batch=32, scheme=scheme)
    assert double.step_s == pytest.approx(3.2), "32 samples at 10 a second"
    assert sum(double.split.values()) == pytest.approx(double.step_s)


def test_a_device_that_waits_for_data_waits_alone_too() -> None:
    fed = replace(flat(8), loader_samples_s=10.0)
    alone, eight = (predict(RESNET, fed, devices=devices, local_batch=32) for devices in (1, 8))
    assert alone.efficiency == pytest.approx(1)
    assert eight.step_s == alone.step_s == pytest.approx(3.2), "32 samples at 10 a second"
    assert eight.efficiency == pytest.approx(1)


def test_the_paper_preset_of_onebit_computes_half_of_the_papers_minibatch_in_a_backward() -> None:
    from bigstep.recipes import load

    config = load("onebit", "paper")
    assert config.exchange.double_buffer
    assert 2 * config.batch == 2880


def test_buckets_hold_every_gradient_once() -> None:
    for bucket_mb in (0.001, 4, 1e6):
        buckets = make_buckets(RESNET, bucket_mb)
        assert sum(bucket.values for bucket in buckets) == RESNET.parameters
        assert sum(bucket.encoded("onebit") for bucket in buckets) == encoded_bytes("onebit", RESNET.shapes)
        assert [bucket.layer for bucket in buckets] == sorted((b.layer for b in buckets), reverse=True)


def test_convergence_law_is_the_published_fit() -> None:
    assert IMAGENET_LARS.base_epochs == pytest.approx(33.3, abs=0.05)
    assert IMAGENET_LARS.slope == pytest.approx(7.76e-4, abs=1e-6)
    assert max(abs(e - IMAGENET_LARS.epochs(b)) for b, e in MLPERF_EPOCHS) < 3.4
    assert IMAGENET_LARS.steps(1e12, 1281167) == pytest.approx(994, rel=0.01), "no batch needs fewer steps"


def test_a_law_is_fitted_to_own_runs(tmp_path: Path) -> None:
    for batch, epochs in ((512, 20.0), (2048, 26.0)):
        writer = RunWriter(tmp_path / str(batch), {})
        train = {"kind": "train", "step": 1, "epoch": 1.0, "samples": 1, "loss": 1.0, "lr": 0.1, "images_per_s": 1.0}
        writer.add([train | {"batch": batch}, train | {"batch": 100}])  # an epoch ends with what is left
        for epoch in (epochs - 1, epochs, epochs + 1):
            accuracy = 0.93 if epoch >= epochs else 0.5
            writer.add([{"kind": "eval", "epoch": epoch, "samples": 1, "accuracy": accuracy, "eval_loss": 1.0}])
        writer.finish({})
    law = law_from_runs([tmp_path / "512", tmp_path / "2048"], 92.0)
    assert (law.epochs(512), law.epochs(2048)) == pytest.approx((20, 26))
    assert law_from_runs([tmp_path], 92.0).slope == law.slope  # as a suite leaves them
    with pytest.raises(ConfigError, match="two or more batches"):
        law_from_runs([tmp_path / "512"], 92.0)
    # neither islands, whose batches are their own, nor a run that diverged nor one that has just begun says anything
    for name, config, rows in (
        ("islands", {"islands": {"count": 4}}, [train | {"batch": 4096}, {"kind": "eval", "epoch": 1, "accuracy": 1}]),
        ("diverged", {}, [train | {"batch": 64}, {"kind": "eval", "epoch": 1.0, "accuracy": math.nan}]),
        ("begun", {}, [{"kind": "eval", "epoch": 1.0, "accuracy": 1.0}]),
    ):
        writer = RunWriter(tmp_path / name, config)
        writer.add(rows)
        writer.close()
    assert law_from_runs([tmp_path], 92.0).slope == law.slope


def test_compression_pays_on_slow_networks_only() -> None:
    onebit, dense = Scheme(collective="gather", codec="onebit"), Scheme(collective="torus", codec="fp16")

    def gain(byte_s: float) -> float:
        cluster = ABCI.with_bandwidth(byte_s)
        steps = [predict(RESNET, cluster, devices=64, local_batch=32, scheme=m).step_s for m in (dense, onebit)]
        return steps[0] - steps[1]

    found = find_crossover(RESNET, ABCI, devices=64, local_batch=32, compressed=[onebit], plain=[dense])
    assert found.byte_s is not None
    assert gain(found.byte_s * 0.9) > 0 > gain(found.byte_s * 1.1)
    assert found.pays_here == (gain(ABCI.between.bandwidth_byte_s) > 0)


def test_ranking_is_sorted_and_keeps_to_what_was_asked() -> None:
    choices = rank(RESNET, ABCI, 1024, law=IMAGENET_LARS)
    costs = [choice.cost for choice in choices]
    assert costs == sorted(costs)
    only = rank(RESNET, ABCI, 1024, batch=8192, collective="ring", codec="fp16")
    assert {(c.prediction.scheme.collective, c.prediction.scheme.codec) for c in only} == {("ring", "fp16")}
    assert only[0].prediction.batch == 8192


def test_grids_cover_all_devices() -> None:
    for cluster in (ABCI, Cluster.load("dgx_h100")):
        for devices in (1, 2, 3, 4, 6, 8, 12, 1024, 2048, 3456, 4096):
            X, Y = choose_grid(devices, cluster.devices_per_node)
            assert devices == X * Y


def test_answers_fast_and_without_torch() -> None:
    code = (
        "import sys\nfrom bigstep.plan import cli_result\ncli_result(cluster='abci', gpus=2048)\n"
        "assert not {'torch', 'numpy', 'rich', 'jinja2'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    start = time.process_time()
    cli_result(cluster="abci", gpus=2048)
    assert time.process_time() - start < 1
    start = time.process_time()
    answer = cli_result(cluster="dgx_h100", sweep="gpus=1..65536")
    assert time.process_time() - start < 10
    assert [row["gpus"] for row in answer["sweep"]] == [2**power for power in range(17)]


@pytest.mark.parametrize(
    "arguments", [{"gpus": 64, "sweep": "gpus=1..64"}, {"model": "small", "gpus": 4}, {"validate": True}]
)
def test_every_answer_can_be_printed(arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    render(cli_result(**arguments))
    printed = capsys.readouterr().out
    assert "How sure" in printed or "rows count" in printed


def test_the_tables_of_the_manual_are_current() -> None:
    manual = Path(__file__).parents[1] / "docs" / "planner.md"
    text = manual.read_text(encoding="utf-8")
    rows = check_rows()
    for row in rows:
        line = f"| {row.system} | {row.quantity} | {row.published:,.4g} {row.unit} | {row.predicted:,.4g} |"
        assert line in text, "run benchmarks/planner/tables.py"
    assert f"worst **{100 * summarise(rows)['worst_error']:.1f} %**" in text
