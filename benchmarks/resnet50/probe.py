"""Where the time of ResNet-50 goes on this GPU, piece by piece: convolutions, batch-norm passes, whole steps."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
import torch.nn.functional as F  # noqa: N812

from bigstep.kernels import GraphedStep, optimize
from bigstep.kernels import batch_norm_launch as launch
from bigstep.models.resnet import resnet50
from bigstep.optim import LARS, parameter_groups

OUT = os.environ.get("OUT", ".")
NHWC = torch.channels_last
RESULT: dict[str, object] = {}


def timed(function, repeats: int = 12, warm: int = 3) -> float:
    """Median milliseconds."""
    for _ in range(warm):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


ONE = torch.ones(2048, device="cuda")


def stem(batch: int) -> None:
    rows = {}
    for name, channels, k, stride, side, pad in (
        ("3ch 7x7/2", 3, 7, 2, 224, 3), ("4ch 7x7/2", 4, 7, 2, 224, 3), ("8ch 7x7/2", 8, 7, 2, 224, 3),
        ("s2d 12ch 4x4", 12, 4, 1, 115, 0), ("s2d 16ch 4x4", 16, 4, 1, 115, 0),
    ):  # fmt: skip
        x = torch.randn(batch, channels, side, side, device="cuda", dtype=torch.float16).to(memory_format=NHWC)
        w = torch.randn(64, channels, k, k, device="cuda", dtype=torch.float16).to(memory_format=NHWC)
        y = F.conv2d(x, w, stride=stride, padding=pad)
        dy = torch.randn_like(y)
        fwd = timed(lambda x=x, w=w, s=stride, p=pad: F.conv2d(x, w, stride=s, padding=p))
        wgrad = timed(
            lambda x=x, w=w, s=stride, p=pad, dy=dy: torch.ops.aten.convolution_backward(
                dy, x, w, None, [s] * 2, [p] * 2, [1, 1], False, [0, 0], 1, [False, True, False]
            )
        )
        rows[name] = (fwd, wgrad)
        print("stem", name, f"fwd {fwd:.3f} wgrad {wgrad:.3f}")
    RESULT["stem"] = rows


def pool(batch: int) -> None:
    """The stem's two special kernels under several block shapes."""
    x = torch.randn(batch, 64, 112, 112, device="cuda", dtype=torch.float16).to(memory_format=NHWC)
    one = ONE[:64]
    stats = launch.statistics(x, one, one, None, None, 1, 0.1, 1e-5)
    y, winner, _ = launch.pool(x, stats)
    dz = torch.randn_like(y)
    coefficient = torch.randn(2, 1, 64, device="cuda")
    for pixels, warps in ((8, 1), (8, 2), (8, 4), (16, 4), (16, 2), (32, 4), (32, 8), (64, 8)):
        launch.POOL_PIXELS, launch.POOL_WARPS = pixels, warps
        launch.UNPOOL_PIXELS, launch.UNPOOL_WARPS = pixels, warps
        forward = timed(lambda: launch.pool(x, stats))
        backward = timed(lambda: launch.unpool(dz, winner, x, stats, coefficient))
        print(f"pool {pixels} pixels {warps} warps: forward {forward:.3f} backward {backward:.3f}")
    launch.POOL_PIXELS, launch.POOL_WARPS, launch.UNPOOL_PIXELS, launch.UNPOOL_WARPS = 8, 2, 16, 4


def whole(batches: list[int]) -> None:
    for batch in batches:
        torch.manual_seed(0)
        model = resnet50(classes=1000, channels=3, image_size=224).cuda()
        optimize(model)
        optimizer = LARS(parameter_groups(model, 5e-5), lr=0.1)
        step = GraphedStep(model, torch.nn.CrossEntropyLoss(label_smoothing=0.1), optimizer)
        images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.float16).to(memory_format=NHWC)
        labels = torch.randint(1000, (batch,), device="cuda")
        begin = time.time()
        losses = [float(step(images, labels)) for _ in range(4)]
        ms = timed(lambda step=step, i=images, y=labels: step(i, y), 20, 3)
        losses.append(float(step(images, labels)))
        print(
            f"whole {batch}: {ms:.3f} ms, {batch / ms * 1000:.0f} img/s, losses {losses}, {float(step.skipped)} skipped"
        )
        print(f"  peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, in {time.time() - begin:.1f} s", flush=True)
        RESULT[f"whole_{batch}"] = ms
        if batch in (512, 64):
            profile(lambda step=step, i=images, y=labels: step(i, y), f"profile_{batch}")
        del step, model, optimizer
        torch.cuda.empty_cache()


def profile(call, name: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    rows = sorted(
        ((e.key, e.count // 3, e.self_device_time_total / 3000) for e in prof.key_averages()), key=lambda r: -r[2]
    )
    RESULT[name] = rows
    print(f"{name}: {sum(r[2] for r in rows):.2f} ms in kernels")
    for key, count, ms in rows[:60]:
        print(f"  {ms:8.3f} ms {count:4d} x {key[:110]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["whole", "pool", "stem"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--whole", type=int, nargs="*", default=[512, 256, 64])
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    for what in args.what:
        begin = time.time()
        try:
            {"whole": lambda: whole(args.whole), "pool": lambda: pool(args.batch),
             "stem": lambda: stem(args.batch)}[what]()  # fmt: skip
        except Exception:
            import traceback

            traceback.print_exc()
        print(f"== {what}: {time.time() - begin:.1f} s", flush=True)
        with open(os.path.join(OUT, "probe.json"), "w") as file:
            json.dump(RESULT, file, indent=1)
