"""ResNet-50 on one GPU: bigstep beside eager torch and torch.compile, interleaved in one run.

    PYTHONPATH=src python benchmarks/resnet50/run.py --out results

writes resnet50.json and resnet50.md. `--only` picks sections; `--seconds` caps the whole run: sections that would start
after it are left out and named.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import accuracy
import bounds
import torch
from rivals import Step, batch_of, network, ours, usual

import optimizers
from bigstep.gpu import optimize

RIVALS = {  # batch -> rivals worth their compile time there
    512: [("torchvision", None), ("torchvision", "default"), ("timm", "default")],
    256: [("torchvision", None), ("torchvision", "default"), ("timm", "default")],
    64: [("torchvision", None), ("torchvision", "reduce-overhead")],
    40: [("torchvision", None), ("torchvision", "reduce-overhead")],
}
REPEATS, STEPS = 7, 8
COMPILE_SECONDS = 150


def name_of(source: str, mode: str | None) -> str:
    return f"{source}, eager" if mode is None else f"{source}, torch.compile ({mode})"


def timed(step: Step, batch: tuple[torch.Tensor, torch.Tensor], steps: int) -> float:
    """Milliseconds a step."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        step(*batch)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / steps


def compare(steps: dict[str, Step], size: int) -> list[dict[str, object]]:
    """Time all rivals in turn, REPEATS times; each after a warm-up that also builds graphs and compiled code."""
    batch = batch_of(size)
    rows = {}
    for name, step in steps.items():
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin = time.time()
        first = float(step(*batch))
        for _ in range(4):
            step(*batch)
        peak = torch.cuda.max_memory_allocated() - base
        rows[name] = {"what": name, "batch": size, "first_loss": first, "peak_gib": peak / 2**30, "ms": []}
        torch.cuda.synchronize()
        print(f"  {name} ready in {time.time() - begin:.1f} s", flush=True)
    for _ in range(REPEATS):
        for name, step in steps.items():
            rows[name]["ms"].append(timed(step, batch, STEPS))
    for name, step in steps.items():
        row = rows[name]
        row["last_loss"] = float(step(*batch))
        row["finite"] = bool(torch.isfinite(torch.tensor([row["first_loss"], row["last_loss"]])).all())
        row["median_ms"] = statistics.median(row["ms"])
        row["spread_ms"] = max(row["ms"]) - min(row["ms"])
        row["images_per_s"] = size / row["median_ms"] * 1000
        print(f"  {size:5d} {name}: {row['images_per_s']:.0f} img/s ({row['median_ms']:.2f} ms), "
              f"loss {row['first_loss']:.3f} -> {row['last_loss']:.3f}, peak {row['peak_gib']:.1f} GiB", flush=True)  # fmt: skip  # noqa: E501
    return list(rows.values())


def throughput(size: int, result: dict) -> None:
    steps = {"bigstep": ours()}
    steps |= {name_of(*rival): usual(*rival) for rival in RIVALS[size]}
    result.setdefault("throughput", []).extend(compare(steps, size))


def ghost(result: dict) -> None:
    plain, grouped = ours(groups=1), ours(groups=32)
    result["ghost"] = compare({"ordinary batch norm": plain, "32 workers x 32 images": grouped}, 1024)


def profile(result: dict) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    result["profile"] = {}
    for size in (512, 64):
        step, batch = ours(), batch_of(size)
        for _ in range(3):
            step(*batch)
        torch.cuda.synchronize()
        with record(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(4):
                step(*batch)
            torch.cuda.synchronize()
        rows = [(e.key, e.count // 4, e.self_device_time_total / 4000) for e in prof.key_averages()]
        plain, model = network("torchvision").train(), network("torchvision").train()
        optimize(model)
        kinds = bounds.table(rows, bounds.of_step(model, plain, batch[0]))
        result["profile"][size] = {"kinds": kinds, "kernels": sorted(rows, key=lambda r: -r[2])[:80]}
        for kind in kinds[:14]:
            print("  ", size, kind, flush=True)
        del step, model, plain
        torch.cuda.empty_cache()


def warm_compile_cache(sizes: list[int]) -> None:
    """Compile all rivals at once in processes of their own; this one then reads the results from torch's cache."""
    jobs = [
        subprocess.Popen(
            [sys.executable, __file__, "--warm", source, mode, str(size)],
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for size in sizes
        for source, mode in RIVALS[size]
        if mode is not None
    ]
    deadline = time.time() + COMPILE_SECONDS
    for job in jobs:
        try:
            job.wait(max(1.0, deadline - time.time()))
        except subprocess.TimeoutExpired:
            job.kill()


def machine() -> dict[str, object]:
    def commit() -> str:
        try:
            return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    import triton

    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "triton": triton.__version__, "python": platform.python_version(),
        "commit": os.environ.get("BIGSTEP_COMMIT") or commit(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def markdown(result: dict) -> str:
    lines = ["# ResNet-50, 224 px, one GPU", "", ", ".join(f"{k} {v}" for k, v in result["machine"].items()), ""]
    lines += ["Forward + backward + update, label smoothing 0.1, fp16, random images on the device; medians of "
              f"{REPEATS} interleaved repeats of {STEPS} steps. bigstep takes LARS steps, the others fused SGD.", ""]  # fmt: skip  # noqa: E501
    for title in ("throughput", "ghost"):
        if title in result:
            lines += [f"## {title}", "", "| batch | what | img/s | ms a step | spread ms | peak GiB | losses finite |", "|---|---|---|---|---|---|---|"]  # fmt: skip  # noqa: E501
            lines += [f"| {r['batch']} | {r['what']} | {r['images_per_s']:,.0f} | {r['median_ms']:.2f} | {r['spread_ms']:.2f} | {r['peak_gib']:.1f} | {r['finite']} |" for r in result[title]]  # fmt: skip  # noqa: E501
            lines.append("")
    if "optimizers" in result:
        lines += ["## One update of 161 tensors, 25.6 M parameters", "", "| what | microseconds | launches |", "|---|---|---|"]  # fmt: skip  # noqa: E501
        lines += [f"| {r['what']} | {r['us']:.0f} | {r['launches']} |" for r in result["optimizers"]] + [""]
    if "accuracy" in result:
        a = result["accuracy"]
        lines += ["## Gradients against float64", "", f"{a['layers']} parameter tensors, {a['seeds']} seeds, batch {a['batch']}; relative error in the 2-norm.", "", "| | median | 90th percentile | largest |", "|---|---|---|---|"]  # fmt: skip  # noqa: E501
        lines += [f"| {k} | {a[k]['median']:.2e} | {a[k]['p90']:.2e} | {a[k]['max']:.2e} |" for k in ("fused", "eager")]
        lines += ["", f"The fused error is at most 1.05 times the eager one in {a['no_worse']} of {a['layers']} tensors (mean over seeds).", ""]  # fmt: skip  # noqa: E501
    for size, p in result.get("profile", {}).items():
        lines += [f"## Where a step of {size} images goes", "", "| kernels | launches | ms | least ms | share of the bound |", "|---|---|---|---|---|"]  # fmt: skip  # noqa: E501
        for k in p["kinds"]:
            bound = "" if k["bound_ms"] is None else f"{k['bound_ms']:.2f}"
            share = "" if k["bound_ms"] is None else f"{k['bound_ms'] / k['ms']:.0%}"
            lines.append(f"| {k['kind'][:60]} | {k['launches']} | {k['ms']:.3f} | {bound} | {share} |")
        lines.append("")
    if result.get("left_out"):
        lines += [f"Left out: {'; '.join(result['left_out'])}", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", nargs="*", default=["512", "64", "256", "optimizers", "ghost", "accuracy", "profile", "40"])  # fmt: skip  # noqa: E501
    parser.add_argument("--warm", nargs=3)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = 64
    if args.warm:
        source, mode, size = args.warm
        step, batch = usual(source, mode), batch_of(int(size))
        for _ in range(2):
            step(*batch)
        torch.cuda.synchronize()
        return
    begin = time.time()
    result: dict = {"machine": machine(), "left_out": []}
    sections = {str(size): (lambda r, size=size: throughput(size, r)) for size in RIVALS}
    sections |= {"ghost": ghost, "profile": profile}
    sections |= {"optimizers": optimizers.measure, "accuracy": accuracy.measure}
    if sizes := [size for size in RIVALS if str(size) in args.only]:
        warm_compile_cache(sizes)
        print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    for section in args.only:
        if time.time() - begin > args.seconds:
            result["left_out"].append(f"{section}: out of time")
            continue
        start = time.time()
        try:
            sections[section](result)
        except Exception as error:
            import traceback

            traceback.print_exc()
            result["left_out"].append(f"{section}: {error}"[:300])
        gc.collect()
        torch.cuda.empty_cache()
        print(f"== {section}: {time.time() - start:.0f} s", flush=True)
        Path(args.out).mkdir(parents=True, exist_ok=True)
        Path(args.out, "resnet50.json").write_text(json.dumps(result, indent=1))
        Path(args.out, "resnet50.md").write_text(markdown(result))


if __name__ == "__main__":
    main()
