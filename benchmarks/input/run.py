"""Does the input keep up? Images a second of a folder of JPEGs, by number of loaders, beside the rate of ResNet-50.

    PYTHONPATH=src python benchmarks/input/run.py --out results --seconds 80

writes input.json and input.md. Without --data it makes a folder of JPEGs of ImageNet's usual size (about 500 x 375,
quality 90). `--seconds` caps the whole run: what would begin after it is left out and named.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from bigstep.data.feed import Feed, Request
from bigstep.data.sources.folder import FolderImages, open_folder
from bigstep.records import describe_machine

SIZE, BATCH, CHUNK = 224, 256, 64
CLASSES = 4


def photograph(seed: int) -> Image.Image:
    """Smooth light, shapes with edges, and grain: it compresses to about what a photograph of this size does."""
    rng = np.random.default_rng(seed)
    width, height = [(500, 375), (500, 333), (375, 500), (480, 360), (640, 480)][seed % 5]
    picture = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)  # fmt: skip  # noqa: E501
    draw = ImageDraw.Draw(picture)
    for _ in range(40):
        x, y, r = rng.integers(0, width), rng.integers(0, height), rng.integers(4, 90)
        (draw.ellipse if rng.random() < 0.5 else draw.rectangle)([x - r, y - r, x + r, y + r // 2 + 1], fill=tuple(rng.integers(0, 256, 3).tolist()))  # fmt: skip  # noqa: E501
    grain = rng.normal(0, 14, (height // 2, width // 2, 1)).repeat(2, 0).repeat(2, 1) + rng.normal(0, 5, (height // 2 * 2, width // 2 * 2, 3))  # fmt: skip  # noqa: E501
    pixels = np.asarray(picture, dtype=np.float32)[: grain.shape[0], : grain.shape[1]] + grain
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write(job: tuple[str, int]) -> None:
    path, seed = job
    photograph(seed).save(path, quality=90)


def pinned_room(size: int) -> memoryview:
    """Return pinned host memory, which a GPU reads without a copy in between, or plain memory if there is no GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()).numpy().data


def make_folder(root: Path, count: int) -> Path:
    """Make files for training; those for evaluation are the same."""
    jobs = []
    for label in range(CLASSES):
        place = root / "train" / f"class{label}"
        place.mkdir(parents=True)
        jobs += [(str(place / f"{n}.JPEG"), (count // CLASSES) * label + n) for n in range(count // CLASSES)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(write, jobs, chunksize=8))
    (root / "val").symlink_to(root / "train", target_is_directory=True)
    return root


def requests(count: int):
    """Batches without end, each sample of an epoch once."""
    for epoch in itertools.count():
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        yield from (Request(epoch, part) for part in torch.split(order, BATCH))


def rate(source: FolderImages, device: torch.device, loaders: int, train: bool, seconds: float) -> float:
    """Images a second through a feed that nobody slows down; starting the loaders does not count."""
    feed = Feed(source, train=train, augment="resized_crop", image_size=SIZE, device=device, loaders=loaders)
    batches = feed(requests(len(source)))
    for _ in range(2 if loaders else 1):
        next(batches)
    synchronize(device)
    # what the loaders have ready by now was made before the clock starts: draw it down
    ready = 0 if not loaders else 2 * loaders * CHUNK // BATCH
    for _ in range(ready):
        next(batches)
    started, images = time.perf_counter(), 0
    while time.perf_counter() - started < seconds or not images:
        images += len(next(batches)[1])
    synchronize(device)
    elapsed = time.perf_counter() - started
    batches.close()
    feed.close()
    del feed, batches
    gc.collect()
    return images / elapsed


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decoders(source: FolderImages, seconds: float) -> dict[str, float]:
    """Milliseconds of CPU to decode one file to RGB pixels on one core, by library."""
    contents = [source.path(index).read_bytes() for index in range(min(64, len(source)))]

    def pillow(content: bytes) -> None:
        Image.open(io.BytesIO(content)).convert("RGB").load()

    ways = {"Pillow": pillow}
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:
        pass
    else:

        def by_torchvision(content: bytes) -> None:
            decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)

        ways["torchvision"] = by_torchvision
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in ways}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or not found["Pillow"]:
        for name, decode in ways.items():
            started = time.process_time()
            for content in contents:
                decode(content)
            found[name].append(1e3 * (time.process_time() - started) / len(contents))
    torch.set_num_threads(threads)
    return {name: min(times) for name, times in found.items()}


def parts(source: FolderImages, seconds: float) -> dict[str, float]:
    """Milliseconds of CPU for one image on one core: from file to a training crop, and to an evaluation crop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    indices = list(range(min(CHUNK, len(source))))
    ways = {
        "training crop": lambda: source.load_random_crops(indices, SIZE, 0, 0, 0.08),
        "evaluation crop": lambda: source.load_crops(indices, SIZE),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or not found["training crop"]:
        for name, load in ways.items():
            started = time.process_time()
            load()
            found[name].append(1e3 * (time.process_time() - started) / len(indices))
    torch.set_num_threads(threads)
    return {name: min(times) for name, times in found.items()}


def model_rate(device: torch.device, batch: int, seconds: float) -> tuple[float, str]:
    """Images a second of ResNet-50, forward, backward and update, as `bigstep train` runs it on this device."""
    from bigstep.models import build_model

    model = build_model("resnet50", classes=1000, channels=3, image_size=SIZE).to(device).train()
    x, y = torch.randn(batch, 3, SIZE, SIZE, device=device), torch.randint(0, 1000, (batch,), device=device)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    if device.type == "cuda":
        from bigstep.gpu import GraphedStep, optimize

        torch.backends.cudnn.benchmark = True  # as a run does
        optimize(model)
        x = x.to(memory_format=torch.channels_last)
        step = GraphedStep(model, loss, torch.optim.SGD(model.parameters(), 0.01, 0.9, fused=True))
        what = "fused kernels, one CUDA graph, fp16"
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
        what = f"float32, {torch.get_num_threads()} threads"

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(1 if device.type == "cpu" else 5):
        step(x, y)
    synchronize(device)
    began, steps, ends = time.perf_counter(), 0, deque()
    while steps == 0 or time.perf_counter() - began < seconds:
        step(x, y)
        steps += 1
        if device.type == "cuda":  # the host runs ahead, as it does in a run, but not without end
            ends.append(torch.cuda.Event())
            ends[-1].record()
            if len(ends) > 4:
                ends.popleft().synchronize()
    synchronize(device)
    return batch * steps / (time.perf_counter() - began), what


def counts(cores: int) -> list[int]:
    return [0, *(2**n for n in range(20) if 2**n < cores), cores]


def needed(result: dict) -> str:
    """How many loaders, and so about how many cores, would keep up."""
    model, best = result["model"]["images_per_s"], max(result["train"], key=lambda row: row["images_per_s"])
    enough = [row["loaders"] for row in result["train"] if row["images_per_s"] >= model]
    if enough:
        return f"{min(enough)} loaders keep up with the model."
    each = best["images_per_s"] / max(best["loaders"], 1)
    wanted = int(np.ceil(model / each))
    return (
        f"None of these keeps up: the best, {best['loaders']} loaders, brings {best['images_per_s']:,.0f} of "
        f"{model:,.4g} images/s. At {each:,.0f} images/s a loader about {wanted} loaders, on as many cores, would."
    )


def markdown(result: dict) -> str:
    machine, model = result["machine"], result["model"]
    files = result["files"]
    lines = [
        "# Does the input keep up?",
        "",
        f"{machine['hardware']['processor']}, {machine['hardware']['cores']} cores; device {result['device']}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + f"; commit {machine['commit'] or 'unknown'}.",
        f"{files['count']} JPEGs, {files['width']:.0f} x {files['height']:.0f} pixels and {files['kb']:.0f} kB on "
        f"average, in the page cache; {SIZE} px, batches of {BATCH}.",
        "",
        "| loaders | training, images/s | evaluation, images/s | training rate / model's |",
        "|---:|---:|---:|---:|",
    ]
    evaluation = {row["loaders"]: row["images_per_s"] for row in result["evaluation"]}
    for row in result["train"]:
        other = evaluation.get(row["loaders"])
        lines.append(
            f"| {row['loaders']} | {row['images_per_s']:,.0f} | {'' if other is None else f'{other:,.0f}'} "
            f"| {row['images_per_s'] / model['images_per_s']:.2f} |"
        )
    lines += [
        "",
        f"ResNet-50, forward, backward and update, batch {model['batch']} ({model['what']}): "
        f"**{model['images_per_s']:,.4g} images/s**. {needed(result)}",
        "",
        "One core, one image: "
        + ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["parts"].items())
        + "; of that "
        "decoding: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["decoders"].items()) + ".",
    ]
    if result["left_out"]:
        lines += ["", f"Left out for want of time: {', '.join(result['left_out'])}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--data", type=Path, help="a folder with train/ and val/; made if not given")
    parser.add_argument("--images", type=int, default=512, help="how many to make")
    parser.add_argument("--batch", type=int, help="of the model; 256 on a GPU, 8 on a CPU")
    parser.add_argument("--seconds", type=float, default=80.0, help="for everything")
    parser.add_argument("--loaders", type=int, nargs="*", help="numbers of loaders; 0, 1, 2, 4, … up to the cores")
    args = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    tried = args.loaders or counts(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as scratch:
        train, test = open_folder(args.data or make_folder(Path(scratch), args.images))
        weight = sum(train.path(n).stat().st_size for n in range(len(train)))
        width, height = train.sizes.double().mean(0).tolist()
        files = {"count": len(train), "width": width, "height": height, "kb": weight / len(train) / 1e3}
        print(f"{files} after {time.perf_counter() - begin:.0f} s", flush=True)
        result = {"machine": describe_machine(), "device": name, "files": files, "train": [], "evaluation": []}
        result["left_out"] = []
        batch = args.batch or (256 if device.type == "cuda" else 8)
        share = max(0.5, args.seconds / 30)
        rate_of_model, what = model_rate(device, batch, share)
        result["model"] = {"images_per_s": rate_of_model, "batch": batch, "what": what}
        result["decoders"], result["parts"] = decoders(train, share), parts(train, share)
        print(result["model"], result["decoders"], result["parts"], flush=True)
        # the most interesting first, should the time run out: all cores, then few
        order = [(loaders, True) for loaders in sorted(tried, reverse=True)]
        order += [(loaders, False) for loaders in sorted(tried, reverse=True)]
        left = max(2.0, args.seconds - (time.perf_counter() - begin))
        each = max(0.5, left / len(order) - 2.0)  # two seconds to start the loaders and to fill their queues
        for loaders, is_train in order:
            kind = "train" if is_train else "evaluation"
            if result["train"] and time.perf_counter() - begin + each > args.seconds:
                result["left_out"].append(f"{kind} with {loaders} loaders")
                continue
            found = rate(train if is_train else test, device, loaders, is_train, each)
            result[kind].append({"loaders": loaders, "images_per_s": found})
            print(
                f"{kind:>10} {loaders:3} loaders {found:8,.0f} images/s  ({time.perf_counter() - begin:.0f} s)",
                flush=True,
            )
    for kind in ("train", "evaluation"):
        result[kind].sort(key=lambda row: row["loaders"])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "input.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "input.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    sys.exit(main())
