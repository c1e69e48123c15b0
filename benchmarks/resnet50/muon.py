"""Muon on ResNet-50: one update alone, as a CUDA graph, and within the whole step at 512 images, beside LARS.

    PYTHONPATH=src python benchmarks/resnet50/muon.py --out benchmarks/resnet50/results/muon_h200.json

takes less than a minute on an H200. `--check` runs a small network on a CPU, with a tape in place of the graph, to try
the script.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigstep.gpu import GraphedStep, optimize
from bigstep.gpu.capture import CudaGraphs, Tapes
from bigstep.gpu.update import GroupSettings, make_update
from bigstep.models import build_model
from bigstep.norm import zero_gamma
from bigstep.optim import LARS, Muon, parameter_groups
from bigstep.optim.orthogonal import SPARE, batches_of, flops_of

REPEATS = 15
STEPS = 8
RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LARS": lambda groups: LARS(groups, lr=0.1),
    "Muon, 5 iterations, rest SGD": lambda groups: Muon(groups, lr=0.02, rest="sgd"),
    "Muon, 3 iterations, renormalised, rest SGD": lambda groups: Muon(
        groups, lr=0.02, iterations=3, renormalise=True, rest="sgd"
    ),
}


def network(check: bool) -> nn.Module:
    """The network in the memory order in which it is trained."""
    torch.manual_seed(0)
    name, side = ("resnet18", 32) if check else ("resnet50", 224)
    model = build_model(name, classes=1000, channels=3, image_size=side)
    zero_gamma(model)
    return model.to("cpu" if check else "cuda", memory_format=torch.channels_last).train()


def arithmetic(model: nn.Module) -> dict[str, Any]:
    """What the iterations compute, and in which batches."""
    groups = parameter_groups(model, 0.0)
    matrices = [p.flatten(1) for g in groups for p, k in zip(g["params"], g["kind"], strict=True) if k == "matrix"]
    shapes = [(min(m.shape), max(m.shape)) for m in matrices]
    batches = [[shapes[place] for place in batch] for batch in batches_of(shapes, SPARE)]
    done = sum(len(batch) * flops_of(*max(batch)) for batch in batches)
    return {
        "matrices": len(shapes),
        "shapes": len(set(shapes)),
        "batches": [f"{len(batch)} x {max(batch)[0]} x {max(batch)[1]}" for batch in batches],
        "gflop_an_iteration": sum(flops_of(*shape) for shape in shapes) / 1e9,
        "with_zeros": done / 1e9,
    }


def update_of(model: nn.Module, rule: str) -> Callable[[], None]:
    """One update from fp16 gradients under a loss scale, which writes fp16 copies: what a step does at its end."""
    optimizer = RULES[rule](parameter_groups(model, 5e-5))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    copies = [p.detach().half() if p.dim() > 1 else None for p in params]
    grads = [torch.randn_like(p, dtype=torch.float16 if p.dim() > 1 else torch.float32) for p in params]
    settings = GroupSettings(optimizer, params[0].device, torch.float32)
    settings.write()
    update = make_update(optimizer, params, copies)
    assert update.in_graph, "it would run behind the graph"
    update.bind(grads)
    factor, skipped = (torch.full((), value, device=params[0].device) for value in (1e-3, 0.0))
    return lambda: update.launch(grads, settings.values, factor, skipped)


def milliseconds(call: Callable[[], Any], steps: int) -> float:
    """Of a call, over some in a row."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(steps):
            call()
        return (time.perf_counter() - begin) * 1000 / steps
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def kernels_of(call: Callable[[], Any]) -> tuple[int, list[tuple[str, int, float]]]:
    """Launches of a call, and the costliest kernels with their microseconds."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as record:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    taken = [
        (event.key, event.count, event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        for event in record.key_averages()
    ]
    counted = [each for each in taken if each[2] > 0]
    return sum(count for _, count, _ in counted), sorted(counted, key=lambda each: -each[2])[:15]


@torch.no_grad()
def alone(check: bool) -> list[dict[str, Any]]:
    """Updates by themselves, interleaved."""
    model = network(check)
    maker = Tapes() if check else CudaGraphs(torch.device("cuda"))
    calls: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    kept = []  # a graph does not keep the tensors alive that it reads
    for rule in RULES:
        update = update_of(model, rule)
        kept.append(update)
        maker.warm_up(update)
        launches, costliest = kernels_of(update)
        graph, _ = maker.capture(update)
        calls[rule] = graph.replay
        rows[rule] = {"rule": rule, "launches": launches, "costliest": costliest, "ms": []}
    for _ in range(2 if check else REPEATS):
        for rule, call in calls.items():
            rows[rule]["ms"].append(milliseconds(call, 1 if check else STEPS))
    for row in rows.values():
        row["median_ms"] = statistics.median(row["ms"])
        print(f"  {row['rule']}: {row['median_ms']:.3f} ms in a graph, {row['launches']} launches", flush=True)
    return list(rows.values())


def in_step(check: bool, size: int) -> list[dict[str, Any]]:
    """Whole steps, interleaved."""
    device, side = ("cpu", 32) if check else ("cuda", 224)
    images = torch.randn(size, 3, side, side, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (size,), device=device)
    steps: dict[str, GraphedStep] = {}
    for rule, make in RULES.items():
        model = network(check)
        optimize(model)
        optimizer = make(parameter_groups(model, 5e-5))
        precision = "float32" if check else "fp16"
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        steps[rule] = GraphedStep(model, loss, optimizer, precision=precision, emulate=check)
    batch: tuple[Tensor, Tensor] = (images if check else images.half(), labels)
    rows = {rule: {"rule": rule, "batch": size, "first_loss": float(step(*batch))} for rule, step in steps.items()}
    times: dict[str, list[float]] = {rule: [] for rule in steps}
    for _ in range(1 if check else 7):
        for rule, step in steps.items():
            step(*batch)
            times[rule].append(milliseconds(lambda step=step: step(*batch), 1 if check else STEPS))
    for rule, row in rows.items():
        median = statistics.median(times[rule])
        row |= {"ms": times[rule], "images_per_s": size / median * 1000, "last_loss": float(steps[rule](*batch))}
        print(f"  {rule}: {row['images_per_s']:.0f} images/s, {median:.2f} ms a step", flush=True)
    return list(rows.values())


def main() -> None:
    """Write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "muon_h200.json")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    device = "cpu" if options.check else torch.cuda.get_device_name()
    result: dict[str, Any] = {"commit": asked.stdout.strip(), "torch": torch.__version__, "device": device}
    result |= {"python": platform.python_version(), "arithmetic": arithmetic(network(options.check))}
    print(result["arithmetic"])
    result["alone"] = alone(options.check)
    options.out.write_text(json.dumps(result, indent=1) + "\n")  # what there is, in case the rest fails
    result["in_step"] = in_step(options.check, 4 if options.check else options.batch)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
