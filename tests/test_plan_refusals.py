"""Files and requests that cannot be planned are refused with one sentence that names the field."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bigstep.errors import ConfigError
from bigstep.plan import Cluster, Scheme, Workload, cli_result, predict
from bigstep.plan.answer import parse_sweep

RESNET = Workload.load("resnet50")
ABCI = Cluster.load("abci")

CLUSTER: dict[str, Any] = {
    "nodes": 2,
    "devices_per_node": 4,
    "device": {"memory_gib": 16, "memory_bandwidth_gbyte_s": 900, "sustained_tflop_s": 10},
    "inside": {"bandwidth_gbyte_s": 50, "latency_us": 3},
    "between": {"bandwidth_gbit_s": 100, "latency_us": 14},
}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"devices_per_node": 0}, "devices_per_node is 0"),
        ({"nodes": -1}, "nodes is -1"),
        ({"nodes": 1.5}, "nodes takes a whole number"),
        ({"node": 2}, "Unknown field 'node': did you mean 'nodes'"),
        ({"between": {"bandwidth": 100, "latency_us": 14}}, "between.bandwidth.*bandwidth_gbit_s"),
        ({"between": {"bandwidth_gb": 100, "latency_us": 14}}, "between.bandwidth_gb.*bandwidth_gbit_s"),
        ({"between": {"bandwidth_gbit_s": "100 Gb/s", "latency_us": 14}}, "between.bandwidth_gbit_s takes a number"),
        ({"between": {"bandwidth_gbit_s": -100, "latency_us": 14}}, "between.bandwidth_gbit_s is -100"),
        ({"between": {"bandwidth_gbit_s": 1, "bandwidth_mbit_s": 1, "latency_us": 1}}, "given twice"),
        ({"between": {"bandwidth_gbit_s": float("nan"), "latency_us": 1}}, "between.bandwidth_gbit_s takes a number"),
        ({"between": {"latency_us": 14}}, "between lacks the field 'bandwidth_gbit_s'"),
        ({"between": [1]}, "between takes a mapping"),
        ({"inside": {"bandwidth_gbyte_s": 50, "latency_us": 3, "efficiency": 80}}, "inside.efficiency is 80"),
        ({"oversubscription": 0.5}, "oversubscription is 0.5"),
        ({"device": {"memory_gib": 16, "memory_bandwidth_gbyte_s": 900}}, "device lacks the field 'sustained_tflop_s'"),
        ({"in_network": "yes"}, "in_network takes true or false"),
        ({"codecs": {"1bit": {"encode_gbyte_s": 1, "decode_gbyte_s": 1}}}, "no codec '1bit'"),
        ({"collectives": {"toros": {"latency_us": 1}}}, "no collective 'toros': did you mean 'torus'"),
    ],
)
def test_a_wrong_cluster_is_refused_in_one_sentence(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as refused:
        Cluster.from_mapping(CLUSTER | change, "mine.yaml")
    assert "\n" not in str(refused.value)


def test_a_file_that_holds_no_fields_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^The file must be a mapping of fields"):
        Cluster.from_mapping([1], "mine.yaml")  # type: ignore[arg-type]  # as YAML may


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"layers": []}, "no layers"),
        ({"layers": [{"shapes": [[2, 0]], "gflop": 1}]}, r"layers\[0\].shapes"),
        ({"layers": [{"shapes": [[2]], "flop": 1}]}, r"layers\[0\].flop"),
        ({"layers": [{"shapes": [[2]], "forward_us": -1}]}, r"layers\[0\].forward_us is -1"),
        ({"layers": [{"shapes": [[2]]}]}, "gflop"),
        ({"measured_batch": 8, "layers": [{"shapes": [[2]], "gflop": 1}]}, "measured_batch"),
    ],
)
def test_a_wrong_workload_is_refused_in_one_sentence(content: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Workload.from_mapping(content, "mine.yaml")


def test_files_that_are_no_yaml_or_missing_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("nodes: [1")
    with pytest.raises(ConfigError, match=r"broken.yaml.* not valid YAML"):
        Cluster.load(str(broken))
    broken.write_text("a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a]\nnodes: [*b, *b]\n")
    with pytest.raises(ConfigError, match="line 2 is not valid YAML: aliases"):  # nine of them took a gigabyte
        Cluster.load(str(broken))
    with pytest.raises(ConfigError, match="cannot be read"):
        Workload.load(str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match="did you mean 'abci'"):
        Cluster.load("abcj")
    with pytest.raises(ConfigError, match="did you mean 'resnet50'"):
        Workload.load("resnet-50")


def test_what_cannot_run_is_refused() -> None:
    huge = replace(RESNET, name="huge", layers=RESNET.layers * 100)
    with pytest.raises(ConfigError, match=r"huge needs at least .* device.memory_gib is 16"):
        predict(huge, ABCI, devices=4, local_batch=1)
    with pytest.raises(ConfigError, match="abci has 4352"):
        predict(RESNET, ABCI, devices=5000, local_batch=1)
    with pytest.raises(ConfigError, match="at least 1"):
        predict(RESNET, ABCI, devices=0, local_batch=1)
    with pytest.raises(ConfigError, match="onebit codes"):
        Scheme(collective="ring", codec="onebit")
    with pytest.raises(ConfigError, match="grid is 3x3"):
        predict(RESNET, ABCI, devices=8, local_batch=1, scheme=Scheme(collective="torus", grid=(3, 3)))
    with pytest.raises(ConfigError, match="law for resnet50 ends at"):
        cli_result(gpus=8, target=80.0)
    with pytest.raises(ConfigError, match="target is 0.75, but it is in percent: write 75"):
        cli_result(gpus=8, target=0.75)
    with pytest.raises(ConfigError, match="gpus=FIRST"):
        parse_sweep("batch=1..2")
    with pytest.raises(ConfigError, match="did you mean 'onebit'"):
        cli_result(gpus=8, codec="onebyte")
    for name in ("gpus", "batch", "budget_minutes"):
        with pytest.raises(ConfigError, match=f"{name.removesuffix('_minutes')} is -1, but it must not be negative"):
            cli_result(**{name: -1})
    for name in ("price", "lifetime_hours", "budget_minutes"):
        with pytest.raises(ConfigError, match="finite"):
            cli_result(**{name: math.nan})
        with pytest.raises(ConfigError, match="finite"):
            cli_result(**{name: math.inf})
    with pytest.raises(ConfigError, match="batch is 7, but 8 devices need a sample each"):
        cli_result(gpus=8, batch=7)
