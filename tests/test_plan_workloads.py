"""The planner's workloads: shapes, operations and order of the models that they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bigstep.plan import Cluster, Workload, cli_result
from bigstep.plan.scheme import make_buckets
from bigstep.plan.terminal import asks_sentence
from bigstep.plan.workload import workload_names

RESNET = Workload.load("resnet50")
ABCI = Cluster.load("abci")


def test_workloads_have_the_shapes_of_the_models() -> None:
    import torch

    from bigstep.models import build_model

    of_images = {"resnet9": (10, 3, 32), "small": (10, 1, 28), "mlp": (10, 1, 28)}
    for name in set(workload_names()) - {"speech46m"}:  # the one that is no model here
        workload = Workload.load(name)
        classes, channels, side = of_images.get(name, (1000, 3, 224))
        shape = {"classes": classes, "channels": channels, "image_size": side}
        if workload.tokens:
            shape = {"vocabulary": 50257 if name == "gpt-124m" else 256, "length": workload.tokens}
        with torch.device("meta"):
            model = build_model(name, **shape)
        shapes = sorted(tuple(parameter.shape) for parameter in model.parameters())
        assert sorted(workload.shapes) == shapes, name
    assert len(RESNET.shapes) == 161


@pytest.mark.parametrize("name", ["vgg16", "gpt-mini", "lstm"])
def test_operations_of_workloads_are_those_that_torch_counts(name: str) -> None:
    """What torch's counter sees of a forward pass; it does not see an LSTM, nor that attention is half empty."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from bigstep.models import build_model

    workload, empty, unseen = Workload.load(name), 0.0, 0.0
    if workload.tokens:
        model = build_model(name, vocabulary=256, length=workload.tokens).eval()
        inputs = torch.zeros(1, workload.tokens, dtype=torch.int64)
        empty = sum(layer.flops for layer in workload.layers if "attention" in layer.name)
        unseen = sum(layer.flops for layer in workload.layers if layer.sequential > 1)
    else:
        model, inputs = build_model(name, classes=1000, channels=3, image_size=224).eval(), torch.zeros(1, 3, 224, 224)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(inputs)
    ours = sum(layer.flops for layer in workload.layers)
    assert ours + empty - unseen == pytest.approx(counter.get_total_flops(), rel=1e-6)
    if name == "lstm":
        assert unseen == 2 * 256 * sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)


def test_the_table_of_a_tied_gpt_travels_last() -> None:
    gpt = Workload.load("gpt-124m")
    last = make_buckets(gpt, 25)[-1]
    assert (50257, 768) in last.shapes
    assert last.layer == 0


def test_a_recurrent_layer_pays_a_launch_for_each_token() -> None:
    lstm, gpt = Workload.load("lstm"), Workload.load("gpt-10m")
    device = replace(ABCI.device, flop_s=1e30)  # launches alone
    assert lstm.compute_s(device, 1) == pytest.approx(device.launch_s * (1 + 2 * 256 + 1))
    assert gpt.compute_s(device, 1) == pytest.approx(device.launch_s * gpt.tensors)


@pytest.mark.parametrize("name, rule, states", [("gpt-124m", "adamw", 2), ("lstm", "adamw", 2), ("vgg16", "lars", 1)])
def test_a_plan_tells_arithmetic_bytes_and_the_memory_of_optimizer_states(name: str, rule: str, states: int) -> None:
    answer = cli_result(model=name, cluster="dgx_h200", gpus=8)
    asks, workload = answer["asks"], Workload.load(name)
    assert asks["parameters"] == workload.parameters
    assert asks["optimizer"] == rule
    assert asks["gflop_a_sample"] == workload.step_flops / 1e9
    assert asks["gradient_mb"] == 4 * workload.parameters / 1e6
    memory = asks["memory_gb"]
    assert memory["optimizer"] == pytest.approx(states * memory["weights"])
    assert memory["weights"] == memory["gradients"] == 4 * workload.parameters / 1e9
    assert sum(memory.values()) < asks["device_gb"] == pytest.approx(141 * 2**30 / 1e9, rel=0.08)
    said = asks_sentence(asks)
    assert f"states of {rule} {memory['optimizer']:.2f}" in said


def test_what_a_small_model_asks_is_not_rounded_to_nothing() -> None:
    said = asks_sentence(cli_result(model="small", gpus=8)["asks"])
    assert " 0.0 " not in said
    assert " 0 MB" not in said
    assert "0.00," not in said


def test_a_measured_model_is_not_said_to_ask_for_no_arithmetic(tmp_path: Path) -> None:
    """Only its times are known."""
    (tmp_path / "mine.yaml").write_text(
        "measured_batch: 32\nlayers:\n- {name: a, shapes: [[100, 200]], forward_us: 10, backward_us: 20}\n"
    )
    asks = cli_result(model=str(tmp_path / "mine.yaml"), cluster="dgx_h200", gpus=8)["asks"]
    assert asks["gflop_a_sample"] is None
    assert "GFLOP" not in asks_sentence(asks)


def test_a_file_that_was_measured_again_is_read_again(tmp_path: Path) -> None:
    for microseconds in (10, 20):
        (tmp_path / "mine.yaml").write_text(
            f"measured_batch: 1\nlayers: [{{shapes: [[2]], forward_us: {microseconds}}}]\n"
        )
        assert Workload.load(str(tmp_path / "mine.yaml")).layers[0].forward_s == pytest.approx(microseconds * 1e-6)
    assert Workload.load("small") is Workload.load("small")
