"""The probe: what it measures adds up, and the planner reads what it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigstep.errors import ConfigError
from bigstep.lab.probe import probe, workload_to_yaml
from bigstep.lab.probe_layers import measure_workload
from bigstep.lab.probe_links import fit_cost, measure_codecs, time_collectives, without_codec
from bigstep.models import build_model
from bigstep.plan import Cluster, Workload, predict
from bigstep.tables.codecs import CODECS, encoded_bytes
from bigstep.tables.collectives import collective_traffic


def test_layers_hold_every_parameter_once_and_survive_the_file(tmp_path: Path) -> None:
    model = build_model("small", classes=10, channels=1, image_size=28)
    workload = measure_workload(model, torch.randn(8, 1, 28, 28), name="small", repeats=1)
    assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in workload.layers if layer.shapes)
    path = tmp_path / "small.yaml"
    path.write_text(workload_to_yaml(workload))
    again = Workload.load(str(path))
    assert again.shapes == workload.shapes
    assert again.measured_batch == 8
    single = predict(again, Cluster.load("big_basin"), devices=1, local_batch=16).single_s
    expected = 2 * sum(layer.forward_s + layer.backward_s for layer in workload.layers) + workload.optimizer_s
    assert single == pytest.approx(expected, rel=1e-3)  # the file keeps nanoseconds


@pytest.mark.parametrize("name", ["gpt-mini", "lstm-mini"])
def test_a_model_of_tokens_is_measured_with_every_parameter_once(name: str, tmp_path: Path) -> None:
    model = build_model(name, vocabulary=256, length=8)
    workload = measure_workload(model, torch.randint(256, (2, 8)), name=name, repeats=1)
    assert sorted(workload.shapes) == sorted(tuple(parameter.shape) for parameter in model.parameters())
    path = tmp_path / "model.yaml"
    path.write_text(workload_to_yaml(replace(workload, tokens=8)))
    again = Workload.load(str(path))
    assert (again.tokens, again.optimizer) == (8, "adamw")
    assert predict(again, Cluster.load("big_basin"), devices=8, local_batch=2).step_s > 0


class Tied(nn.Module):
    """A head that shares its table with the embedding, as most language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.hidden, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.tokens(x)))


def test_a_table_that_is_tied_to_the_head_is_exchanged_once_and_last() -> None:
    workload = measure_workload(Tied(), torch.randint(50, (2, 4)), name="tied", repeats=1)
    assert workload.parameters == 50 * 8 + 8 * 8 + 8
    assert workload.layers[0].shapes == ((50, 8),)
    assert workload.layers[-1].backward_s > 0
    assert sum(layer.backward_s for layer in workload.layers) > 0


def test_what_is_written_over_waits_in_memory_once() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.ReLU())
    workload = measure_workload(model, torch.randn(8, 4), name="in place", repeats=1)
    assert workload.outputs == 6 + 6, "of the linear layer and of the last one"


def test_a_slow_layer_is_seen_as_slow() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4096), nn.Linear(4096, 512))
    workload = measure_workload(model, torch.randn(256, 16), name="uneven")
    assert workload.layers[2].forward_s > 5 * workload.layers[0].forward_s


@pytest.mark.parametrize("name", ["ring", "halving", "torus", "gather"])
def test_the_fit_finds_the_costs_it_is_given(name: str) -> None:
    def seconds(size: int) -> float:
        wire = encoded_bytes("onebit", [(max(1, size // 4096), min(1024, size // 4))]) if name == "gather" else size
        traffic = collective_traffic(name, wire, 4)
        return traffic.messages * 80e-6 + traffic.bytes_sent / 2e9

    fitted = fit_cost(name, [(size, seconds(size)) for size in (1024, 65536, 4194304)], 4)
    assert fitted["latency_us"] == pytest.approx(80)
    assert fitted["copy_gbyte_s"] == pytest.approx(2)


def test_codec_time_is_taken_out_of_an_exchange() -> None:
    points = without_codec([(10**9, 3.0), (10, 1e-3)], {"encode_gbyte_s": 1.0, "decode_gbyte_s": 2.0})
    assert points[0] == (10**9, pytest.approx(1.5))
    assert points[1][1] == pytest.approx(1e-3, rel=1e-3)


def test_codecs_are_timed() -> None:
    speeds = measure_codecs(65536, repeats=1)
    assert set(speeds) == {name for name, entry in CODECS.items() if name != "none" and not entry.own_rounds}
    assert all(value > 0 for speed in speeds.values() for value in speed.values())


def test_collectives_are_timed_on_every_rank(world: Callable[[int], Any]) -> None:
    for found in world(2).run(time_collectives, 1, (1024, 65536)):
        assert set(found) == {"ring", "hierarchical", "torus", "halving", "gather"}
        assert all(seconds > 0 for points in found.values() for _, seconds in points)


def test_what_cannot_be_probed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        probe(tmp_path, ranks=1)
    with pytest.raises(ConfigError, match="resnet5O"):
        probe(tmp_path, model="resnet5O")
    assert not list(tmp_path.iterdir()), "refused before anything was measured"
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            probe(tmp_path, device="cuda")


@pytest.mark.slow
def test_the_planner_reads_what_the_probe_writes(tmp_path: Path) -> None:
    told: list[str] = []
    probe(tmp_path, model="small", batch=8, image_size=28, channels=1, classes=10, repeats=1, tell=told.append)
    assert told[:4] == ["codecs", "collectives among 2 ranks", "memory and arithmetic", "small as a whole"]
    assert told[4].startswith("small, layer by layer")
    machine, workload = Cluster.load(str(tmp_path / "machine.yaml")), Workload.load(str(tmp_path / "small.yaml"))
    assert predict(workload, machine, devices=2, local_batch=8).step_s > 0
