"""Parts of gpu.py that run in a process of their own; each prints what it found as JSON on its last line."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from run import model_rate, synchronize
from torch import Tensor, nn

from bigstep.data.feed import Feed, Request
from bigstep.data.sources.folder import FolderImages, open_folder, scan_folder
from bigstep.data.view import Decoding
from bigstep.gpu.queues import ask_for_queues

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def model(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """ResNet-50 from memory: forward, backward and update."""
    rate, what = model_rate(device, args.batch, 6.0 if device.type == "cuda" else 1.0)
    return {"images_per_s": rate, "what": what, "forward only, images/s": _forward_rate(device)}


def algorithms(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The same where cuDNN times every algorithm of a convolution that it has, and not the ten it thinks best of."""
    torch.backends.cudnn.benchmark_limit = 0
    began = time.perf_counter()
    rate, what = model_rate(device, args.batch, 6.0 if device.type == "cuda" else 1.0)
    return {"images_per_s": rate, "what": f"{what}, every algorithm", "seconds": time.perf_counter() - began}


@torch.no_grad()
def _forward_rate(device: torch.device) -> float:
    """What an evaluation could reach: forward in batches of 2,000."""
    from bigstep.models import build_model

    count = 2000 if device.type == "cuda" else 2
    network = build_model("resnet50", classes=1000, channels=3, image_size=224).to(device).eval()
    x = torch.randn(count, 3, 224, 224, device=device)
    if device.type == "cuda":
        from bigstep.gpu import optimize

        optimize(network)
        network.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
        return count / _seconds(lambda: network(x), device)


def feed(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The input alone, with nobody to compute beside it, by the number of threads; `0.5`: they decode every other."""
    found: dict[str, Any] = {}
    source, judged = open_folder(args.folder)
    cuda = device.type == "cuda"
    kinds = ((4, True, 1.0), (4, False, 1.0), (1, True, 1.0), (8, True, 1.0), (args.cores, True, 0.5))
    for readers, train, share in kinds if cuda else ((1, True, 1.0),):
        options: dict[str, Any] = {"train": train, "augment": "resized_crop", "image_size": args.size}
        decoding = Decoding("nvjpeg") if share == 1 else Decoding("both", "torchvision", share)
        decoding = decoding if cuda else Decoding("pillow")
        way = Feed(source if train else judged, device=device, loaders=readers, decoding=decoding, **options)
        order = torch.randperm(len(way), generator=torch.Generator().manual_seed(0))
        batches = way(Request(0, part) for part in torch.split(order, args.batch if train else 2000))
        for _ in range(4):
            next(batches)
        synchronize(device)
        began, images = time.perf_counter(), 0
        for x, _ in batches:
            images += len(x)
            if time.perf_counter() - began > (2.5 if cuda else 0.5):
                break
        synchronize(device)
        rate = images / (time.perf_counter() - began)
        spent = dict(way._way.waits.thread)
        each = {name: round(1e6 * value / spent["images"], 1) for name, value in spent.items() if name != "images"}
        kind = "training" if train else "evaluation"
        found[f"{kind}, {readers} threads, {share}"] = {"images/s": round(rate), **each}
        batches.close()
        way.close()
    return found


def loop(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The loop that users write with torchvision: ImageFolder, transforms, DataLoader, autocast."""
    from torchvision import models, transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    data = ImageFolder(str(args.folder / "train"), transforms.Compose([*steps, transforms.Normalize(MEAN, STD)]))
    loader = torch.utils.data.DataLoader(
        data, args.batch, shuffle=True, num_workers=args.cores, pin_memory=device.type == "cuda", drop_last=True,
        persistent_workers=True,
    )  # fmt: skip
    network = models.resnet50() if device.type == "cuda" else models.resnet18()
    network.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    cost = nn.CrossEntropyLoss()
    began, images, seen = 0.0, 0, 0
    for images_, targets in itertools.islice(
        itertools.chain.from_iterable(itertools.repeat(loader)), 4 * args.warm + 8
    ):
        if seen == args.warm:
            synchronize(device)
            began = time.perf_counter()
        x = images_.to(device, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = cost(network(x), targets.to(device, non_blocking=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        images += args.batch if seen >= args.warm else 0
        seen += 1
    synchronize(device)
    return {"images_per_s": images / (time.perf_counter() - began), "cores": args.cores, "steps": seen - args.warm}


def compare(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What the GPU decodes, cuts and normalises beside work of its own, against the CPU's, image by image."""
    source = open_folder(args.folder)[0] if args.photos is None else scan_folder(args.photos)
    distinct = source.subset(torch.arange(0, len(source), max(1, len(source) // args.count))[: args.count])
    found: dict[str, Any] = {}
    for kind, train in (("training crops", True), ("evaluation crops", False)):
        found[kind] = _compared(distinct, args, device, train)
    found["of"] = source.name if args.photos else "made photographs"
    found["odd files"] = _odd_files(args, device)
    return found


def _compared(source: FolderImages, args: argparse.Namespace, device: torch.device, train: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"train": train, "augment": "resized_crop", "image_size": args.size, "device": device}
    options["loaders"] = args.cores
    batches = [Request(1, part) for part in torch.split(torch.arange(len(source)), args.batch)]
    on_device = Decoding("nvjpeg") if device.type == "cuda" else Decoding("pillow")
    cpu, gpu = Feed(source, **options), Feed(source, decoding=on_device, **options)
    busy = torch.randn(4096, 4096, device=device) if device.type == "cuda" else torch.randn(64, 64)
    means, worst, began = [], 0.0, time.perf_counter()
    for (x, y), (u, v) in zip(cpu(batches), gpu(batches), strict=True):
        for _ in range(20):  # work that keeps the stream busy while memory is freed and decoded into
            busy = torch.tanh(busy @ busy)
        assert torch.equal(y, v)
        levels = (_grey(x) - _grey(u)).abs()
        means.append(levels.mean((1, 2, 3)))
        worst = max(worst, levels.max().item())
        del x, u, levels
    cpu.close()
    gpu.close()
    each = torch.cat(means)
    return {
        "images": len(each), "mean grey levels": each.mean().item(), "worst image, mean": each.max().item(),
        "worst pixel": worst, "images off by more than 4 in the mean": int((each > 4).sum()),
        "images off by more than 1 in the mean": int((each > 1).sum()), "seconds": time.perf_counter() - began,
    }  # fmt: skip


def _grey(x: Tensor) -> Tensor:
    mean, std = (torch.tensor(values, device=x.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (x.float() * std + mean) * 255


def _odd_files(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Grey, CMYK, progressive, turned, stored as RGB: what torchvision gives for each on the GPU, unguarded."""
    if device.type != "cuda":
        return {"left out": "no GPU"}
    import io

    from PIL import Image
    from torchvision.io import ImageReadMode, decode_jpeg

    source = open_folder(args.folder)[0]
    with source.open(0) as image:
        picture = image.convert("RGB")
    tags = Image.Exif()
    tags[0x0112] = 6
    kinds: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "plain": (picture, {}), "grey": (picture.convert("L"), {}), "CMYK": (picture.convert("CMYK"), {}),
        "progressive": (picture, {"progressive": True}), "turned": (picture, {"exif": tags}),
        "4:4:4": (picture, {"subsampling": 0}), "4:2:2": (picture, {"subsampling": 1}),
        "stored as RGB": (picture, {"keep_rgb": True}),
    }  # fmt: skip
    found = {}
    for name, (drawn, options) in kinds.items():
        content = io.BytesIO()
        drawn.save(content, "JPEG", quality=90, **options)
        expected = torch.frombuffer(bytearray(Image.open(content).convert("RGB").tobytes()), dtype=torch.uint8)
        expected = expected.view(picture.height, picture.width, 3).permute(2, 0, 1).float()
        raw = torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)
        try:
            got = decode_jpeg([raw], mode=ImageReadMode.RGB, device=device)[0].cpu().float()
            same = got.shape == expected.shape
            found[name] = (got - expected).abs().mean().item() if same else f"of shape {tuple(got.shape)}"
        except RuntimeError as error:
            found[name] = str(error)[:120]
    return found


def kernel(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The crop kernel alone, and the GPU's decoders alone by the number of images in a call."""
    from bigstep.data.augment import resized_crop_boxes
    from bigstep.data.decoders import nvjpeg
    from bigstep.gpu.crops import Parts, crop_batch

    n, width, height = args.batch, 500, 375
    images = list(torch.randint(0, 256, (n, 3, height, width), dtype=torch.uint8, device=device))
    left, top, w, h = resized_crop_boxes(torch.arange(n), 0, 0, height, width).round()
    bounds = torch.stack([left, top, left + w, top + h], 1).long()
    parts = Parts(torch.stack([left, top, w, h], 1), bounds, torch.arange(n) % 2 == 0)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float16):
        out = torch.empty(n, 3, args.size, args.size, dtype=dtype, device=device, memory_format=torch.channels_last)
        launch = functools.partial(crop_batch, images, parts, out, MEAN, STD)
        found[f"crops, {dtype}, ms a batch"] = 1e3 * _seconds(launch, device)
        if device.type == "cuda":
            found[f"of these, the kernel, {dtype}"] = _kernel_ms(launch)
    if device.type != "cuda":
        return found
    source = open_folder(args.folder)[0]
    chosen = [index % len(source) for index in range(512)]
    files = [torch.frombuffer(bytearray(source.content(index)), dtype=torch.uint8) for index in chosen]
    for count in (32, 64, 128, 256, 512):
        decode = nvjpeg.decode_on_device
        seconds = _seconds(lambda count=count, decode=decode: decode(files[:count], device, _refuse), device)
        found[f"nvJPEG alone, {count} at once, images/s"] = count / seconds
    return found


def _kernel_ms(launch: Any) -> float:
    """What the device itself takes for the kernel, as its profiler says."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            launch()
        torch.cuda.synchronize()
    rows = [row for row in profile.key_averages() if "crop_kernel" in row.key]
    return sum(row.device_time_total for row in rows) / 1e3 / max(sum(row.count for row in rows), 1)


def _refuse(number: int) -> Tensor:
    raise AssertionError("the GPU refused a file")


def _seconds(work: Any, device: torch.device) -> float:
    for _ in range(2):
        work()
    synchronize(device)
    rounds = 20 if device.type == "cuda" else 1
    began = time.perf_counter()
    for _ in range(rounds):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["model", "algorithms", "loop", "compare", "kernel", "feed"])
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    for name, default in (("batch", 256), ("size", 224), ("count", 10_000), ("cores", 1), ("warm", 25)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.part != "loop":  # which is for those who have not heard of queues
        ask_for_queues()  # as a run does, before torch is asked for a GPU
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    print(json.dumps(globals()[args.part](args, device)))


if __name__ == "__main__":
    main()
