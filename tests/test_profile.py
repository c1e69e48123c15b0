"""Profiles: every microsecond is in the table once, costs are those of the formulas, and the run takes its path."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bigstep.cli import main
from bigstep.data.sampler import Position, Step
from bigstep.engine.methods.base import Outcome
from bigstep.engine.profile.costs import cost_of
from bigstep.engine.profile.groups import DATA, STEP, WARM_UP_STEPS, group_of_kernel
from bigstep.engine.profile.profiler import StepProfiler
from bigstep.engine.profile.table import Peaks, table_of
from bigstep.engine.profile.text import profile_markdown

PEAKS = Peaks(bytes_per_s=1e9, flops_per_s=1e12, dtype="float32")  # 1,000 bytes or 1,000,000 FLOPs a microsecond


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": named}


def tensors(*shapes: list[int], kind: str = "float") -> dict[str, Any]:
    return {"Input Dims": list(shapes), "Input type": [kind] * len(shapes)}


def operation(name: str, ts: float, dur: float, *shapes: list[int], tid: int = 1, number: int = 0) -> dict[str, Any]:
    made = event("cpu_op", name, ts, dur, tid)
    made["args"] = tensors(*shapes) | {"External id": number}
    return made


def test_each_microsecond_of_a_cpu_step_is_charged_once() -> None:
    events = [
        event("user_annotation", STEP, 0, 1000),
        event("user_annotation", STEP, 1000, 1000),
        event("user_annotation", DATA, 10, 100),
        operation("aten::mul", 20, 40, [10, 10], [10, 10]),  # inside data
        operation("aten::linear", 200, 300, [100, 50], [20, 50]),  # its children are its own
        operation("aten::t", 210, 20, [20, 50]),
        operation("aten::addmm", 240, 200, [20], [100, 50], [50, 20]),
        operation("autograd::engine::evaluate_function: MulBackward0", 600, 100),
        operation("aten::add", 620, 50, [500], [500]),
        event("user_annotation", "Optimizer.step#SGD.step", 1500, 100),
        operation("aten::add_", 1510, 60, [500], [500]),
        operation("aten::mm", 5000, 900, [10, 10], [10, 10]),  # after the profiled steps
        operation("aten::mm", 300, 200, [10, 10], [10, 10], tid=2),  # another thread: it runs beside this one
    ]
    table = table_of(events, PEAKS)
    assert table.steps == 2
    assert table.step_us == 1000
    by_name = {row.name: row for row in table.rows}
    assert sum(row.us for row in table.rows) == pytest.approx(1000)
    assert {row.group: row.us for row in table.groups} == pytest.approx(
        {
            "convolution and matmul": 150,
            "activation and elementwise": 25,
            "optimizer": 50,
            "data": 50,
            "host gaps": 25 + 700,
        }
    )
    linear = by_name["linear 100x50 * 20x50"]
    assert (linear.us, linear.calls) == (150, 0.5)
    assert linear.flops == 2 * 100 * 50 * 20 / 2
    assert linear.bytes == 4 * (100 * 50 + 20 * 50 + 100 * 20) / 2
    assert linear.bound_us == pytest.approx(linear.bytes / 1000)  # the copy takes longer than the product
    assert linear.reached == pytest.approx(linear.bytes / 1000 / 150)
    assert by_name["add_"].bytes == 4 * 3 * 500 / 2  # two read, one written
    assert by_name["Python of data"].us == 30
    assert by_name["autograd engine"].us == 25
    assert by_name["mul"].group == "data"


def test_waiting_for_other_ranks_is_taken_out_of_the_gaps() -> None:
    events = [event("user_annotation", STEP, 0, 1000), operation("aten::add", 0, 300, [5], [5])]
    shares = {row.group: row.us for row in table_of(events, PEAKS, waited_us=200).groups}
    assert shares == {"activation and elementwise": 300, "exchange": 200, "host gaps": 500}


def kernel(name: str, ts: float, dur: float, number: int | None = None, stream: int = 7, **args: Any) -> dict[str, Any]:
    return event("kernel", name, ts, dur, stream, External_id=number, **args)


def test_kernels_are_charged_to_the_operation_that_launched_them() -> None:
    events = [
        event("user_annotation", STEP, 0, 1000),
        operation("aten::conv2d", 10, 30, [2, 3, 8, 8], [4, 3, 3, 3], number=1),
        operation("aten::cudnn_convolution", 15, 20, [2, 3, 8, 8], [4, 3, 3, 3], number=2),
        operation("aten::add", 50, 10, [1000], [1000], number=3),
        kernel("nchwToNhwc", 100, 50, 2),
        kernel("sm90_xmma_fprop", 150, 250, 2),
        kernel("elementwise", 400, 100, 3),
        kernel("ncclDevKernel_AllReduce", 450, 150, None, stream=20),  # 50 of it beside the one above
        kernel("stray", 2000, 100, 3),
    ]
    events[1]["args"]["Concrete Inputs"] = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]
    table = table_of(events, PEAKS, device="cuda")
    found = {row.name: row for row in table.rows}
    convolution = found["conv2d 2x3x8x8 * 4x3x3x3"]
    assert (convolution.us, convolution.calls) == (300, 1)
    assert convolution.flops == 2 * (2 * 4 * 8 * 8) * 27
    assert convolution.bytes == 4 * (2 * 3 * 64 + 4 * 27 + 2 * 4 * 64)
    assert found["add"].us == 100
    assert found["ncclDevKernel_AllReduce"].group == "exchange"
    assert found["device idle"].us == 500


def test_a_rehearsal_tells_what_the_kernels_of_a_graph_are() -> None:
    launch = event("cuda_runtime", "cudaGraphLaunch", 5, 5, correlation=77)
    steps = [event("user_annotation", STEP, 0, 500), event("user_annotation", STEP, 500, 500)]
    graph = [
        kernel(name, start + ts, dur, 9, correlation=77)
        for start in (100, 600)
        for name, ts, dur in (("gemm", 0, 100), ("vectorized", 110, 20), ("gemm", 130, 60), ("update_kernel", 200, 40))
    ]
    # an update may use kernels of the same name, and so may operations outside the graph
    graph += [kernel("vectorized", start + 245, 5, 9, correlation=77) for start in (100, 600)]
    graph += [operation("aten::copy_", 20, 5, [10], [10], number=30), kernel("vectorized", 50, 10, 30)]
    rehearsal = [
        event("user_annotation", STEP, 0, 900),
        operation("aten::mm", 0, 10, [10, 20], [20, 30], number=1),
        operation("aten::relu", 10, 10, [10, 30], number=2),
        operation("aten::mm", 20, 10, [10, 30], [30, 5], number=3),
        kernel("gemm", 100, 5, 1),
        kernel("vectorized", 200, 5, 2),
        kernel("gemm", 300, 5, 3),
    ]
    known = {
        row.name: row for row in table_of([*steps, launch, *graph], PEAKS, device="cuda", rehearsal=rehearsal).rows
    }
    assert (known["mm 10x20 * 20x30"].us, known["mm 10x20 * 20x30"].flops) == (100, 2 * 10 * 20 * 30)
    assert (known["mm 10x30 * 30x5"].us, known["mm 10x30 * 30x5"].calls) == (60, 1)
    assert (known["relu"].us, known["relu"].bytes) == (20, 2 * 4 * 300)
    assert (known["vectorized"].us, known["vectorized"].calls, known["copy_"].us) == (5, 1, 5)
    assert (known["update_kernel"].group, known["update_kernel"].bytes) == ("optimizer", None)
    assert known["device idle"].us == 270
    alone = {row.name: row for row in table_of([*steps, launch, *graph], PEAKS, device="cuda").rows}
    assert (alone["gemm"].us, alone["gemm"].calls, alone["gemm"].group) == (160, 2, "convolution and matmul")


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16>", "convolution and matmul"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "convolution and matmul"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", "batch norm"),
        ("merge_statistics_kernel", "batch norm"),
        ("void at::native::(anonymous)::multi_tensor_apply_kernel<>", "optimizer"),
        ("trust_kernel", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f16_RING_LL", "exchange"),
        ("Memcpy HtoD (Pinned -> Device)", "data"),
        ("void at::native::vectorized_elementwise_kernel<4>", "activation and elementwise"),
    ],
)
def test_kernels_are_known_by_name(name: str, group: str) -> None:
    assert group_of_kernel(name) == group


def ways() -> dict[str, Callable[[], torch.Tensor]]:
    x, linear = torch.randn(2, 6, 9, 9, requires_grad=True), nn.Linear(7, 4)
    convolutions = {
        "plain": nn.Conv2d(6, 4, 3),
        "strided": nn.Conv2d(6, 4, 3, stride=2, padding=1),
        "oblong": nn.Conv2d(6, 4, (3, 1), padding=(1, 0)),
        "dilated": nn.Conv2d(6, 4, 2, dilation=3),
    }
    found: dict[str, Callable[[], torch.Tensor]] = {
        name: (lambda module=module: module(x)) for name, module in convolutions.items()
    }
    found["linear"] = lambda: linear(torch.randn(3, 5, 7, requires_grad=True))
    found["bmm"] = lambda: torch.bmm(torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True))
    return found


def notes_of(profiler: StepProfiler, *, pausing: bool) -> list[str]:
    """What the end of a step makes a profiler say."""
    step, outcome = Step(Position(), stop=1, workers=1, local_batch=1), Outcome(torch.zeros(()))
    return [note.text for note in profiler.stepped(step, outcome, pausing=pausing)]


@pytest.mark.parametrize("way", ways())
def test_flops_are_those_that_torch_counts(way: str, tmp_path: Path) -> None:
    call = ways()[way]
    with FlopCounterMode(display=False) as counter:
        call().sum().backward()
    profiler = StepProfiler(tmp_path, 1, torch.device("cpu"), "float32")
    for _ in range(WARM_UP_STEPS):
        assert not notes_of(profiler, pausing=False)
    call().sum().backward()
    note = notes_of(profiler, pausing=False)
    profile = json.loads((tmp_path / "profile.json").read_bytes())
    assert sum(row["flops"] for row in profile["rows"]) == counter.get_total_flops()
    assert note[0].startswith("Profiled 1 step of")


def test_flops_of_a_grouped_convolution_count_what_a_filter_sees() -> None:
    # by hand, since torch's own counter takes the gradient of the weights for one of all channels
    shapes = tensors([2, 4, 9, 9], [2, 6, 9, 9], [4, 3, 3, 1])
    backward = shapes | {
        "Concrete Inputs": ["", "", "", "[4]", *["[1, 1]"] * 3, "False", "[0, 0]", "2", "[True, True, True]"]
    }
    assert cost_of("aten::convolution_backward", backward).flops == 2 * (2 * 2 * 4 * 81) * (3 * 3 * 1)
    backward["Concrete Inputs"][10] = "[False, True, False]"  # the first layer's input needs no gradient
    assert cost_of("aten::convolution_backward", backward).flops == 2 * (2 * 4 * 81) * (3 * 3 * 1)


def test_bytes_leave_out_what_is_broadcast_and_what_is_only_looked_at() -> None:
    broadcast = {"Input Dims": [[8, 100], [8, 100]], "Input Strides": [[100, 1], [1, 0]], "Input type": ["float"] * 2}
    assert cost_of("aten::mul", broadcast).bytes == 4 * (800 + 8 + 800)
    assert cost_of("aten::view", tensors([8, 100])).bytes == 0
    assert cost_of("aten::copy_", tensors([8, 100], [8, 100], kind="c10::Half")).bytes == 2 * 1600
    chosen = tensors([5000, 10], [], [6]) | {"Concrete Inputs": ["", "0", ""]}
    chosen["Input type"] = ["unsigned char", "Scalar", "long int"]
    assert cost_of("aten::index_select", chosen).bytes == 2 * 60
    assert cost_of("aten::index", tensors([5000, 10])) is None
    lists = {"Input Dims": [[[3, 4], [5]], [[3, 4], [5]]], "Input type": ["TensorList"] * 2}
    assert cost_of("aten::_foreach_add_", lists).bytes == 4 * 3 * 17
    norm = cost_of("aten::native_batch_norm_backward", tensors([2, 8, 4, 4], [2, 8, 4, 4], [8], kind="float"))
    assert norm.bytes == 4 * (3 * 256 + 8)


SMALL = [
    "--set", "model=mlp", "--set", "workers.count=2", "--set", "workers.local_batch=16", "--device", "cpu", "--json",
    "--no-report", "--steps", str(WARM_UP_STEPS + 4),
]  # fmt: skip


def test_a_profile_leaves_the_path_of_a_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(name: str, *more: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["bigstep", "train", *SMALL, "--out", str(tmp_path / name), *more])
        with pytest.raises(SystemExit) as ending:
            main()
        assert not ending.value.code
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    plain, watched = trained("plain"), trained("watched", "--profile", "3")
    assert watched["weights_sha256"] == plain["weights_sha256"]
    profile, folder = watched["profile"], tmp_path / "watched"
    assert profile["steps"] == 3
    assert sum(row["us"] for row in profile["rows"]) == pytest.approx(profile["step_us"])
    assert sum(row["us"] for row in profile["groups"]) == pytest.approx(profile["step_us"])
    groups = {row["name"]: row for row in profile["groups"]}
    assert {"convolution and matmul", "optimizer", "data", "host gaps"} <= set(groups)
    # two workers of 16 samples through layers of |W| weights: forward, and backward for weights and (but the first) x
    weights = [784 * 256, 256 * 256, 256 * 10]
    by_formula = sum(2 * 32 * each * (3 if n else 2) for n, each in enumerate(weights))
    assert groups["convolution and matmul"]["flops"] == pytest.approx(by_formula)
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert sum(each.get("name") == STEP for each in trace["traceEvents"]) == 3
    assert "profile" not in plain
    notes = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("Profiled 3 steps" in str(row.get("text")) for row in notes)
    assert (folder / "profile.md").read_text() == profile_markdown(profile)
    shown = profile_markdown(profile, most_rows=4)
    assert "smaller ones" in shown
    assert len({len(line) for line in shown.splitlines() if line.startswith("| ") and "calls" in line}) == 2


def test_a_run_too_short_for_a_profile_says_so(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, 2, torch.device("cpu"), "float32")
    assert not notes_of(profiler, pausing=True)
    notes = [*profiler.closed(), *profiler.closed()]
    assert [note.text.split(":")[0] for note in notes] == ["No profile was taken"]


def test_a_profile_ends_before_an_evaluation(tmp_path: Path) -> None:
    notes: list[str] = []
    profiler = StepProfiler(tmp_path, 9, torch.device("cpu"), "float32")
    for step in range(WARM_UP_STEPS + 3):
        torch.ones(3).add_(1)
        notes += notes_of(profiler, pausing=step == WARM_UP_STEPS + 1)
    assert not list(profiler.closed())
    assert len(notes) == 1
    assert "Profiled 2 steps (then came an evaluation or a checkpoint)" in notes[0]


def test_a_profile_that_is_cut_off_says_how_far_it_came(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, 9, torch.device("cpu"), "float32")
    for _ in range(WARM_UP_STEPS + 3):
        assert not notes_of(profiler, pausing=False)
    notes = [note.text for note in (*profiler.closed(), *profiler.closed())]
    assert notes == ["No profile was taken: the run was interrupted after 3 of 9 steps of it."]
    assert list(profiler.feed(iter([(1, 2)]))) == [(1, 2)]
