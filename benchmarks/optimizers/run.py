"""One update of a whole network on a GPU: LAMB and LARS beside torch's fused AdamW on GPT-124M, Muon on ResNet-50.

    PYTHONPATH=src python benchmarks/optimizers/run.py --out results        # about a minute on an H200

writes optimizers.json: for each rule the median and all repeats in microseconds, rules interleaved. Each update is a
CUDA graph, as in `GraphedStep`, so the host plays no part. "alone" has fp32 gradients and no copies, which is what
`optimizer.step()` does; "in training" has bf16 gradients of matrices and rewrites their bf16 copies. `--sweep` times
LAMB and LARS under other sizes of chunks and numbers of warps. `--check` runs a small one on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from bigstep.gpu import chunks as chunk_sizes
from bigstep.gpu import lamb, lars
from bigstep.gpu.update import GroupSettings, StepUpdate, make_update
from bigstep.models import build_model
from bigstep.optim import LAMB, LARS, Muon, parameter_groups

REPEATS, REPLAYS = 21, 10

Update = Callable[[], None]


def network(name: str, device: str, small: bool) -> nn.Module:
    """The weights of a network, in the memory order in which it is trained."""
    torch.manual_seed(0)
    if name == "gpt-124m":
        shape = {"vocabulary": 256, "length": 64} if small else {"vocabulary": 50257, "length": 1024}
        return build_model("gpt-mini" if small else name, **shape).to(device)
    model = build_model("resnet18" if small else name, classes=1000, channels=3, image_size=224)
    return model.to(device, memory_format=torch.channels_last)


def update_of(optimizer: torch.optim.Optimizer, low: bool, make=make_update) -> Update:
    """An update with random gradients, through the protocol that whole-step graphs use.

    `make=StepUpdate` takes the optimizer's own `step()` where there are kernels for it too.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    is_low = [low and p.dim() > 1 for p in params]
    copies = [p.detach().bfloat16() if narrow else None for p, narrow in zip(params, is_low, strict=True)]
    grads: list[Tensor] = [
        torch.randn_like(p).mul_(1e-3).to(torch.bfloat16 if narrow else torch.float32)
        for p, narrow in zip(params, is_low, strict=True)
    ]
    settings = GroupSettings(optimizer, params[0].device, torch.float32)
    settings.write()
    update = make(optimizer, params, copies)
    assert update.in_graph, f"{type(optimizer).__name__} would run behind the graph"
    update.bind(grads)
    return lambda: update.launch(grads, settings.values)


def rules(model: nn.Module) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    """The rules that are compared on one network, made when their turn comes."""
    groups = parameter_groups(model, 0.01)
    return {
        "torch AdamW (fused)": lambda: torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True),
        "AdamW (two launches)": lambda: torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True),
        "LAMB": lambda: LAMB(groups, lr=1e-4, betas=(0.9, 0.95)),
        "LARS": lambda: LARS(groups, lr=1e-4),
        "Muon": lambda: Muon(groups, lr=1e-4),
        "Muon, 3 iterations, renormalised, rest SGD": lambda: Muon(
            groups, lr=1e-4, iterations=3, renormalise=True, rest="sgd"
        ),
        "torch SGD (fused)": lambda: torch.optim.SGD(groups, lr=1e-4, momentum=0.9, fused=True),
    }


def captured(update: Update) -> Update:
    """The update as a CUDA graph; on a CPU, as it is."""
    update()  # compiles, and creates what a first step creates
    if not torch.cuda.is_available():
        return update
    update()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        update()
    return graph.replay


def microseconds(update: Update, replays: int) -> float:
    """Microseconds an update, over some in a row."""
    if not torch.cuda.is_available():
        start_s = time.perf_counter()
        for _ in range(replays):
            update()
        return (time.perf_counter() - start_s) * 1e6 / replays
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        update()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / replays


def compare(updates: dict[str, Update], repeats: int, replays: int) -> list[dict[str, object]]:
    """Time all updates in turn, `repeats` times."""
    graphs = {name: captured(update) for name, update in updates.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            times[name].append(microseconds(graph, replays))
    base = statistics.median(next(iter(times.values())))
    rows: list[dict[str, object]] = []
    for name, us in times.items():
        median = statistics.median(us)
        rows.append(
            {"rule": name, "n": len(us), "median_us": median, "times_first": median / base, "min_us": min(us), "us": us}
        )
        print(f"  {name:45s} {median:9.1f} us   {median / base:5.2f} x the first", flush=True)
    return rows


def sweep(model: nn.Module) -> list[dict[str, object]]:
    """LAMB and LARS under several sizes of chunks."""
    rows = []
    for chunk, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16)):
        chunk_sizes.CHUNK = chunk
        lamb.WARPS = lars.WARPS = warps
        for name in ("LAMB", "LARS"):
            us = microseconds(captured(update_of(rules(model)[name](), low=False)), REPLAYS)
            rows.append({"rule": name, "chunk": chunk, "warps": warps, "us": us})
            print(f"  {name} chunk {chunk} warps {warps}: {us:.1f} us", flush=True)
    return rows


def machine() -> dict[str, str]:
    """Where and with what this was measured."""
    try:
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    commit = os.environ.get("BIGSTEP_COMMIT", commit)
    python = platform.python_version()
    return {"device": device, "torch": torch.__version__, "python": python, "commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.check else "cuda"
    repeats, replays = (2, 1) if args.check else (REPEATS, REPLAYS)
    result: dict[str, object] = {"machine": machine(), "repeats": repeats, "replays": replays}
    for name, compared in (
        ("gpt-124m", ("torch AdamW (fused)", "AdamW (two launches)", "LAMB", "LARS", "Muon")),
        ("resnet50", ("torch SGD (fused)", "LARS", "Muon", "Muon, 3 iterations, renormalised, rest SGD")),
    ):
        model = network(name, device, args.check)
        parameters = sum(p.numel() for p in model.parameters())
        for low, title in ((False, "alone"), (True, "in training")):
            print(f"{name}, {parameters / 1e6:.1f} M parameters, {title}", flush=True)
            with torch.no_grad():
                updates = {
                    rule: update_of(rules(model)[rule](), low, StepUpdate if rule.startswith("torch") else make_update)
                    for rule in compared
                }
                rows = compare(updates, repeats, replays)
            result[f"{name}, {title}"] = {"parameters": parameters, "rows": rows}
            del updates
        if args.sweep and name == "gpt-124m":
            result["sweep"] = sweep(model)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "optimizers.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
