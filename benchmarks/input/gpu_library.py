"""How fast nvJPEG decodes beside a training step when it is called directly, by number of decoders and by option.

    PYTHONPATH=src python benchmarks/input/gpu_library.py --folder FOLDER --seconds 2.5

prints JSON on its last line. For each way: images a second decoded alone; decoded and trained on while both run; and
the mean difference of its pixels from Pillow's in grey levels. `torchvision` is one decoder in a stream of ordinary
priority; the others are `bigstep.data.decoders.nvjpeg_decoders`. `ahead` begins a batch before it takes the last one.
FOLDER holds train/CLASS/*; without it, photographs of 500 x 375 pixels are made. `--tiny` rehearses on a CPU: Pillow
stands in for every decoder, and a small matrix product for the step.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from run import photograph, pinned_room
from torch import Tensor

from bigstep.data.decoders import nvjpeg
from bigstep.data.decoders.nvjpeg_decoders import Decoders, find_library
from bigstep.data.decoders.nvjpeg_library import RefusedError
from bigstep.data.sources.folder import open_folder
from bigstep.gpu.queues import VARIABLE, ask_for_queues

Decode = Callable[[], Sequence[Tensor]]
IN_FLIGHT = 4  # steps, as in a run that reads its loss now and then
ALONE = 20  # batches

LIBRARY: dict[str, dict[str, Any]] = {
    "1 decoder": {"count": 1},
    "2 decoders": {},
    "3 decoders": {"count": 3},
    "2 decoders, ahead": {"ahead": True},
    "3 decoders, ahead": {"count": 3, "ahead": True},
    "2 decoders, pinned files": {"pinned": True},
    "2 decoders, colour as it is stored": {"smooth": False},
    "2 decoders, nothing reserved": {"reserve": None},
    "2 decoders, 512 x 512 reserved": {"reserve": (512, 512)},
    "2 decoders, priority 0": {"priority": 0},
    "2 decoders, priority -3": {"priority": -3},
}


def read(folder: Path, count: int) -> list[bytes]:
    """Return files, over and over if there are not as many."""
    source = open_folder(folder)[0]
    some = [bytes(source.content(index)) for index in range(min(count, len(source)))]
    return list(itertools.islice(itertools.cycle(some), count))


def make_folder(root: Path, files: int) -> Path:
    for split, number in itertools.product(("train", "val"), range(files)):
        path = root / split / f"{number % 2}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(5 * number).save(path, quality=92)  # multiples of 5 have 500 x 375 pixels
    return root


def as_pillow_does(content: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB"))).permute(2, 0, 1)


def in_one_room(files: list[bytes], pinned: bool) -> list[Tensor]:
    """Put the files one behind the other, as they are read in a run."""
    size = sum(map(len, files))
    room = torch.frombuffer(pinned_room(size) if pinned else bytearray(size), dtype=torch.uint8)
    contents = list(room.split([len(file) for file in files]))
    for content, file in zip(contents, files, strict=True):
        content.numpy()[:] = np.frombuffer(file, dtype=np.uint8)
    return contents


class StandIns:
    """Pillow in the place of `Decoders`, for the rehearsal."""

    def __init__(self, library: Any, device: torch.device, **options: Any) -> None:
        pass

    def begin(self, contents: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> Callable[[], list[Tensor]]:
        return lambda: [as_pillow_does(content.numpy().tobytes()) for content in contents]

    def close(self) -> None:
        pass


@contextmanager
def by_library(files: list[bytes], device: torch.device, options: dict[str, Any]) -> Iterator[Decode]:
    """Yield what decodes all of the files by nvJPEG itself."""
    options = dict(options)
    ahead, pinned = options.pop("ahead", False), options.pop("pinned", False)
    contents = in_one_room(files, pinned)
    sizes = [Image.open(io.BytesIO(file)).size for file in files]
    cuda = device.type == "cuda"
    decoders: Any = Decoders(find_library(), device, **options) if cuda else StandIns(None, device, **options)
    under_way: list[Callable[[], Sequence[Tensor]]] = []

    def decode() -> Sequence[Tensor]:
        under_way.append(decoders.begin(contents, sizes))
        if ahead and len(under_way) == 1:
            under_way.append(decoders.begin(contents, sizes))
        return under_way.pop(0)()

    try:
        yield decode
    finally:
        for finish in under_way:
            finish()
        decoders.close()


@contextmanager
def by_torchvision(files: list[bytes], device: torch.device) -> Iterator[Decode]:
    contents = in_one_room(files, pinned=False)
    yield lambda: nvjpeg.decode_on_device(contents, device, refuse)


@contextmanager
def by_pillow(files: list[bytes]) -> Iterator[Decode]:
    yield lambda: [as_pillow_does(file) for file in files]


def refuse(number: int) -> Tensor:
    raise AssertionError(f"the GPU refused file {number}")


def stepping(device: torch.device, batch: int) -> Callable[[], Any]:
    """Return a step of ResNet-50 as `bigstep train` takes it: one CUDA graph, fp16."""
    from bigstep.gpu import GraphedStep, optimize
    from bigstep.models import build_model

    model = build_model("resnet50", classes=1000, channels=3, image_size=224).to(device).train()
    optimize(model)
    x = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (batch,), device=device)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    step = GraphedStep(model, loss, torch.optim.SGD(model.parameters(), 0.01, 0.9, fused=True))
    for _ in range(5):
        step(x, y)
    torch.cuda.synchronize()
    return lambda: step(x, y)


def train_for(step: Callable[[], Any], seconds: float, device: torch.device) -> float:
    """Return steps a second."""
    ends: list[torch.cuda.Event] = []
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
        if device.type == "cuda":
            ends.append(torch.cuda.Event())
            ends[-1].record()
            ends[: -IN_FLIGHT - 1] = []
            ends[0].synchronize() if len(ends) > IN_FLIGHT else None
    if device.type == "cuda":
        torch.cuda.synchronize()
    return steps / (time.perf_counter() - began)


def measure(
    decode: Decode, step: Callable[[], Any], files: list[bytes], seconds: float, device: torch.device
) -> dict[str, Any]:
    """Compare pixels, decode alone, then in a thread beside the step."""
    images = decode()
    off = [(image.cpu().float() - as_pillow_does(f)).abs().mean().item() for image, f in zip(images[:16], files)]  # noqa: B905
    began, calls = time.perf_counter(), 0
    while calls < ALONE and time.perf_counter() - began < seconds:
        decode()
        calls += 1
    row: dict[str, Any] = {"decoded alone": round(calls * len(files) / (time.perf_counter() - began))}
    stop, times, failed = threading.Event(), [], []

    def work() -> None:
        stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        try:
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    began = time.perf_counter()
                    decode()
                    times.append(time.perf_counter() - began)
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    row["trained beside"] = round(len(files) * train_for(step, seconds, device))
    stop.set()
    thread.join()
    if failed:
        raise RuntimeError(failed[0])
    row["decoded beside"] = round(len(files) / statistics.fmean(times))
    row["ms of a call: median, most"] = [round(1e3 * each, 1) for each in (statistics.median(times), max(times))]
    row["off by"] = [round(statistics.fmean(off), 3), round(max(off), 3)]
    return row


def all_ways(files: list[bytes], device: torch.device) -> Iterator[tuple[str, Any]]:
    if device.type == "cuda":
        yield "torchvision", lambda: by_torchvision(files, device)
    else:
        yield "Pillow", lambda: by_pillow(files)
    for name, options in LIBRARY.items():
        yield name, lambda options=options: by_library(files, device, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.5, help="for each way")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    args = parser.parse_args()
    ask_for_queues()  # as a run does; another number is given from outside
    batch, device = (8, torch.device("cpu")) if args.tiny else (args.batch, torch.device("cuda", 0))
    seconds = 0.3 if args.tiny else args.seconds
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or make_folder(Path(scratch), 4 if args.tiny else 64)
        files = read(folder, batch)
    small = torch.randn(200, 200)
    step: Callable[[], Any] = (lambda: small @ small) if args.tiny else stepping(device, batch)
    found: dict[str, Any] = {"queues": os.environ.get(VARIABLE, "as CUDA likes")}
    found["step alone"] = round(batch * train_for(step, seconds, device))
    try:
        found["library"] = find_library().path
    except RefusedError as error:
        found["library"] = str(error)
    for name, way in all_ways(files, device):
        try:
            with way() as decode:
                found[name] = measure(decode, step, files, seconds, device)
        except (RuntimeError, AssertionError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(name, json.dumps(found[name]), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
