"""How fast a GPU decodes JPEGs while it trains, and what that costs the step: by library call, priority and output.

    PYTHONPATH=src python benchmarks/input/gpu_beside.py --folder FOLDER --seconds 3

prints JSON on its last line: for each way of decoding, images a second that were decoded and trained on, alone and
beside each other. `torchvision` is what `data.decoder=nvjpeg` uses. The others call nvJPEG itself, in the library that
torchvision has loaded, in a stream of the same priority as the step's or before it, into memory that is used again;
`YUV` leaves the colours as they are stored, so that nothing is left to do for the processors that the step needs.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from bigstep.data.decoders import nvjpeg
from bigstep.data.decoders.turbo import jpeg_decoder
from bigstep.data.sources.folder import FolderImages, open_folder

HARDWARE = 3
OUTPUTS = {"YUV": 1, "RGB": 3}


class Destination(ctypes.Structure):
    """Where the channels of an image are written."""

    _fields_ = [("channel", ctypes.c_void_p * 4), ("pitch", ctypes.c_size_t * 4)]  # noqa: RUF012 - as ctypes has it


class Library:
    """nvJPEG, as torchvision has loaded it."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self.handle, self.state = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("nvjpegCreateEx", HARDWARE, None, None, 0, ctypes.byref(self.handle))
        self.call("nvjpegJpegStateCreate", self.handle, ctypes.byref(self.state))

    def call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} returned status {status}")

    def decode(self, contents: Sequence[Tensor], into: Any, output: str, stream: torch.cuda.Stream) -> None:
        count = len(contents)
        data = (ctypes.c_void_p * count)(*[content.data_ptr() for content in contents])
        lengths = (ctypes.c_size_t * count)(*[len(content) for content in contents])
        self.call("nvjpegDecodeBatchedInitialize", self.handle, self.state, count, 1, OUTPUTS[output])
        place = ctypes.c_void_p(stream.cuda_stream)
        self.call("nvjpegDecodeBatched", self.handle, self.state, data, lengths, into, place)
        stream.synchronize()


def loaded_library(device: torch.device) -> str:
    """Return the path of the library that torchvision loads when it first decodes on a device."""
    content = io.BytesIO()
    Image.new("RGB", (64, 64), (90, 120, 30)).save(content, "JPEG")
    decode_jpeg, rgb = jpeg_decoder()
    decode_jpeg([torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)], mode=rgb, device=device)
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split()[-1] for line in lines if "nvjpeg" in line.rpartition("/")[2]})
    if not paths:
        raise RuntimeError("torchvision has loaded no nvJPEG")
    return paths[0]


def destinations(contents: Sequence[Tensor], output: str, device: torch.device) -> tuple[Any, list[Tensor]]:
    """Reserve memory for the planes of each image; return it as nvJPEG and as torch see it."""
    into, planes = (Destination * len(contents))(), []
    for place, content in zip(into, contents, strict=True):
        with Image.open(io.BytesIO(content.numpy().tobytes())) as image:
            width, height = image.size
            layers = image.layer  # type: ignore[attr-defined]  # name, horizontal and vertical factor of each channel
        for channel, (_, across, down, _) in enumerate(layers):
            w, h = width, height
            if output == "YUV":
                w, h = -(-width * across // layers[0][1]), -(-height * down // layers[0][2])
            planes.append(torch.zeros(h, w, dtype=torch.uint8, device=device))
            place.channel[channel], place.pitch[channel] = planes[-1].data_ptr(), w
    return into, planes


def ways(contents: list[Tensor], device: torch.device) -> dict[str, Callable[[], None]]:
    """Return what decodes all of the files, by name."""
    found: dict[str, Callable[[], None]] = {}

    def by_torchvision() -> None:
        with torch.cuda.stream(streams[-1]):
            nvjpeg.decode_on_device(contents, device, refuse)

    streams = {0: torch.cuda.Stream(device), -1: torch.cuda.Stream(device, priority=-1)}
    found["torchvision"] = by_torchvision
    try:
        library = Library(loaded_library(device))
    except (OSError, RuntimeError) as error:
        print(f"nvJPEG itself cannot be called: {error}")
        return found
    for output, priority in (("RGB", 0), ("RGB", -1), ("YUV", -1)):
        into, planes = destinations(contents, output, device)

        def by_library(into=into, planes=planes, output=output, stream=streams[priority]) -> None:  # noqa: ANN001
            library.decode(contents, into, output, stream)

        found[f"nvJPEG, {output}, priority {priority}"] = by_library
    return found


def refuse(number: int) -> Tensor:
    raise AssertionError("the GPU refused a file")


def check(contents: list[Tensor], device: torch.device) -> dict[str, float]:
    """Mean differences in grey levels of the first image from torchvision's pixels, and of its brightness."""
    expected = nvjpeg.decode_on_device(contents[:1], device, refuse)[0].float()
    library, stream, found = Library(loaded_library(device)), torch.cuda.Stream(device), {}
    for output in OUTPUTS:
        into, planes = destinations(contents[:1], output, device)
        library.decode(contents[:1], into, output, stream)
        got = torch.stack(planes).float() if output == "RGB" else planes[0].float()
        wanted = (
            expected if output == "RGB" else (expected.permute(1, 2, 0) @ expected.new_tensor([0.299, 0.587, 0.114]))
        )
        found[f"{output}: off by"] = (got - wanted).abs().mean().item()
        found[f"{output}: planes"] = [tuple(plane.shape) for plane in planes]
    return found


def stepping(device: torch.device, batch: int) -> Callable[[], None]:
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


def train_for(step: Callable[[], None], seconds: float, batch: int) -> float:
    """Images a second; at most four steps are on their way, as in a run that reads its loss now and then."""
    ends: list[torch.cuda.Event] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        step()
        ends.append(torch.cuda.Event())
        ends[-1].record()
        if len(ends) > 4:
            ends[-5].synchronize()
    torch.cuda.synchronize()
    return batch * len(ends) / (time.perf_counter() - began)


def measure(source: FolderImages, device: torch.device, batch: int, seconds: float) -> dict[str, Any]:
    contents = [torch.frombuffer(bytearray(source.content(index)), dtype=torch.uint8) for index in range(batch)]
    try:
        found: dict[str, Any] = {"check": check(contents, device)}
    except (OSError, RuntimeError) as error:
        found = {"check": str(error)}
    all_ways = ways(contents, device)
    step = stepping(device, batch)
    found["step alone"] = round(train_for(step, seconds, batch))
    for name, decode in all_ways.items():
        try:
            found[name] = beside(step, decode, batch, seconds)
        except RuntimeError as error:
            found[name] = str(error)
        print(name, found[name], flush=True)
    return found


def beside(step: Callable[[], None], decode: Callable[[], None], batch: int, seconds: float) -> dict[str, Any]:
    """Decode alone, then in a thread beside the step."""
    decode()
    began = time.perf_counter()
    for _ in range(20):
        decode()
    row: dict[str, Any] = {"decoded alone": round(20 * batch / (time.perf_counter() - began))}
    stop, times = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            decode()
            times.append(time.perf_counter() - began)

    thread = threading.Thread(target=work)
    thread.start()
    row["trained beside"] = round(train_for(step, seconds, batch))
    stop.set()
    thread.join()
    row["decoded beside"] = round(batch / statistics.fmean(times))
    row["ms of a call: median, most"] = [round(1e3 * each, 1) for each in (statistics.median(times), max(times))]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each way")
    args = parser.parse_args()
    print(json.dumps(measure(open_folder(args.folder)[0], torch.device("cuda", 0), args.batch, args.seconds)))


if __name__ == "__main__":
    main()
