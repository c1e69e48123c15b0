"""What a run on a GPU would use of the kernels, and the reasons that it gives where it does not."""

from __future__ import annotations

import pytest
import torch

from bigstep.config import RunConfig
from bigstep.config.text import apply_settings
from bigstep.engine.fusing import Kernels, advise_precision, fuse, why_open, why_plain
from bigstep.models import build_model
from bigstep.recipes import load


def config(*settings: str) -> RunConfig:
    return apply_settings(load("lars", "cifar10"), settings)


@pytest.mark.parametrize(
    "settings, own, reason",
    [
        ((), False, None),
        (("kernels=plain",), False, "kernels is plain"),
        (("precision=float64",), False, "the kernels have no float64"),
        (("compile=true",), False, "torch compiles the model"),
        ((), True, "a model of your own stays as it is"),
        (("kernels=graphs",), True, "a model of your own keeps its layers"),
        (("kernels=graphs",), False, None),
    ],
)
def test_reasons_for_plain_torch(settings, own, reason) -> None:
    found = why_plain(config(*settings), own)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_steps_of_an_own_model_are_graphs_only_where_that_is_asked_for() -> None:
    assert why_open(config("kernels=graphs"), own=True) is None
    assert why_open(config("kernels=graphs", "compile=true"), own=True) is None
    assert "kernels=graphs" in str(why_open(config("compile=true"), own=True))
    assert why_open(config("kernels=graphs", "precision=float64"), own=True) == "the kernels have no float64"


def test_a_model_on_a_cpu_is_left_alone_with_a_reason() -> None:
    model = build_model("resnet9", classes=10, channels=3, image_size=32)
    kernels = fuse(model, config(), own=False)
    assert not kernels.fused
    assert all("forward" not in vars(module) for module in model.modules())
    assert str(kernels) == "On the GPU: plain torch; the tensors are on cpu, not on a CUDA device."


def test_the_note_names_what_runs() -> None:
    assert str(Kernels(["1", "5"], graphs=True)) == "On the GPU: 2 fused modules, a CUDA graph for each step."


@pytest.mark.parametrize(
    ("precision", "kind", "capability", "flag"),
    [
        ("float32", "cuda", (9, 0), "--set precision=fp16"),
        ("float32", "cuda", (7, 0), "--set precision=fp16"),
        ("float32", "cuda", (6, 1), None),
        ("fp16", "cuda", (9, 0), None),
        ("float32", "cpu", (9, 0), None),
    ],
)
def test_float32_on_a_gpu_with_matrix_units_is_told_with_the_flag(
    precision: str, kind: str, capability: tuple[int, int], flag: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    said = advise_precision(config(f"precision={precision}"), torch.device(kind))
    assert (said is None) == (flag is None)
    assert flag is None or (said is not None and said.endswith(f"{flag}.") and "lars" in said)
