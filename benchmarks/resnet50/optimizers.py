"""One update of ResNet-50's 161 tensors: bigstep's LARS kernels, its foreach form, timm's LARS, torch's fused SGD."""

from __future__ import annotations

import statistics

import torch
from rivals import network

from bigstep.gpu.lars import LarsKernels, LarsSettings
from bigstep.optim import LARS, parameter_groups


def timed(call, repeats: int = 15) -> float:
    """Median microseconds, from the first launch to the last kernel's end."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def launches(call) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    return sum(e.count for e in prof.key_averages() if e.self_device_time_total > 0)


def graphed(call):
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(result: dict) -> None:
    rows = []

    def add(what: str, call, counted=None) -> None:
        rows.append({"what": what, "us": timed(call), "launches": launches(counted or call)})
        print("  ", rows[-1], flush=True)

    model = network("torchvision").to(memory_format=torch.channels_last)
    params = list(model.parameters())
    velocities = [torch.zeros_like(p) for p in params]
    settings = [LarsSettings(weight_decay=5e-5 if p.dim() > 1 else 0.0, adapt=p.dim() > 1) for p in params]
    lr = {"lr": torch.tensor([1e-3], device="cuda")}
    factor, skipped = torch.tensor(1 / 1024, device="cuda"), torch.zeros((), device="cuda")
    with torch.no_grad():
        for low, title in ((True, "fp16 gradients, fp16 copies written, loss scale on the device"), (False, "fp32")):
            grads = [torch.randn_like(p, dtype=torch.float16 if low and p.dim() > 1 else torch.float32) for p in params]
            copies = [p.detach().half() if p.dim() > 1 else None for p in params] if low else None
            kernels = LarsKernels([p.detach() for p in params], velocities, settings, momentum=0.9, copies=copies)
            kernels.bind(grads)

            def call(kernels=kernels, grads=grads, low=low) -> None:
                kernels.launch(grads, lr, factor if low else None, skipped if low else None)

            add(f"bigstep LARS kernels, {title}, in a CUDA graph", graphed(call), call)
            add(f"bigstep LARS kernels, {title}", call)
    for p in params:
        p.grad = torch.randn_like(p)
    foreach = LARS(parameter_groups(model, 5e-5), lr=1e-3)
    add("bigstep.optim.LARS.step()", foreach.step)
    fused = torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=5e-5, fused=True)
    add("torch.optim.SGD(fused=True)", fused.step)
    try:
        from timm.optim import Lars

        add("timm.optim.Lars", Lars(params, lr=1e-3, momentum=0.9, weight_decay=5e-5).step)
    except ImportError:
        print("   timm is not installed")
    result["optimizers"] = rows


def sweep() -> None:
    """The update under several chunk sizes, in a CUDA graph."""
    from bigstep.gpu import chunks, lars

    params = [p.detach() for p in network("torchvision").to(memory_format=torch.channels_last).parameters()]
    velocities = [torch.zeros_like(p) for p in params]
    grads = [torch.randn_like(p, dtype=torch.float16 if p.dim() > 1 else torch.float32) for p in params]
    copies = [p.half() if p.dim() > 1 else None for p in params]
    settings = [LarsSettings(weight_decay=5e-5 if p.dim() > 1 else 0.0, adapt=p.dim() > 1) for p in params]
    lr = {"lr": torch.tensor([1e-3], device="cuda")}
    for chunks.CHUNK, lars.WARPS in ((4096, 8), (4096, 4), (2048, 4), (8192, 8), (8192, 16), (2048, 8), (1024, 4)):
        kernels = LarsKernels(params, velocities, settings, momentum=0.9, copies=copies)
        kernels.bind(grads)
        us = timed(graphed(lambda k=kernels: k.launch(grads, lr)))
        print(f"  chunk {chunks.CHUNK} warps {lars.WARPS}: {us:.0f} us", flush=True)


if __name__ == "__main__":
    sweep()
