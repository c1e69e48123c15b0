"""A feed whose decoders use memory again: each batch is decoded while the one before is cut, and no image is lost."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from bigstep.data import device_decoding
from bigstep.data.decoders import nvjpeg, nvjpeg_decoders, on_device
from bigstep.data.decoders.choose import _with_way
from bigstep.data.decoders.nvjpeg_library import RefusedError
from bigstep.data.feed import Feed, Request
from bigstep.data.loaders import one_ahead
from bigstep.data.sources.folder import open_folder
from bigstep.data.view import Decoding
from bigstep.errors import DataError
from bigstep.gpu import queues
from test_data_decoders import GREY_LEVEL, by_pillow, with_odd_files
from test_data_folder import make_folder

CPU = torch.device("cpu")


class StandIns:
    """Decoders that overwrite an image as early as they may: when the next batch but one is begun."""

    made: list[StandIns]

    def __init__(self, device: torch.device, count: int) -> None:
        self.count, self.calls, self.told, self.closed = count, 0, [""], False
        self.buffers = [torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)]
        StandIns.made.append(self)

    def begin(self, contents: Sequence[Tensor], sizes: Any) -> Callable[[], list[Tensor]]:
        assert not self.closed
        number, self.calls = self.calls, self.calls + 1
        self.told.append(f"begin {number}")
        opened = [Image.open(io.BytesIO(content.numpy().tobytes())) for content in contents]
        assert [image.size for image in opened] == [tuple(size) for size in sizes.tolist()]
        pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in opened]
        self.buffers[number % 2].fill_(0)
        self.buffers[number % 2] = buffer = torch.cat([image.flatten() for image in pixels])
        parts = buffer.split([image.numel() for image in pixels])

        def finish() -> list[Tensor]:
            self.told.append(f"take {number}")
            if number % 5 == 3:
                raise RefusedError("not this one")
            return [part.view_as(image) for part, image in zip(parts, pixels, strict=True)]

        return finish

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGSTEP_NVJPEG_DECODERS", "2")


@pytest.fixture
def _with_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIns.made = []
    monkeypatch.setattr(nvjpeg, "decode_on_device", by_pillow)
    monkeypatch.setattr(nvjpeg_decoders, "why_not_library", lambda device: None)
    monkeypatch.setattr(nvjpeg_decoders, "open_decoders", StandIns)
    monkeypatch.setattr(device_decoding, "_TOGETHER", 8)


@pytest.mark.usefixtures("_with_stand_ins")
@pytest.mark.parametrize("decoding", [Decoding("nvjpeg"), Decoding("both", share=0.5)], ids=lambda each: each.name)
def test_a_batch_is_cut_before_its_memory_is_used_again(tmp_path: Path, decoding: Decoding) -> None:
    """Batches of one group and of several, some of them refused and decoded by torchvision."""
    source, _ = with_odd_files(tmp_path)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    lengths = (4, 20, 1, 7, 30, 2, 2, 15)
    wanted = [Request(2, order.roll(n).repeat(2)[:length]) for n, length in enumerate(lengths)]
    options: dict[str, Any] = {"train": True, "augment": "resized_crop", "seed": 3, "image_size": 48}
    usual = list(Feed(source, **options)(wanted))
    feed = Feed(source, decoding=decoding, loaders=2, **options)
    for _ in range(2):  # two passes have the same decoders, one after the other
        for (x, y), (u, v) in zip(usual, feed(wanted), strict=True):
            assert torch.equal(y, v)
            assert (x - u).abs().mean((1, 2, 3)).max() < 0.5 * GREY_LEVEL  # of any image: Pillow rounds twice
    assert len(StandIns.made) == 1
    assert StandIns.made[0].count == 2
    told = {what: place for place, what in enumerate(StandIns.made[0].told)}
    assert all(told[f"take {number - 2}"] < told[f"begin {number}"] for number in range(2, StandIns.made[0].calls))
    if decoding.name == "nvjpeg":  # else there may be batches of which the device decodes nothing
        assert told["begin 1"] < told["take 0"]
    feed.close()
    assert StandIns.made[0].closed
    assert len(list(feed(wanted[:2]))) == 2  # a feed that was closed begins anew
    assert len(StandIns.made) == 2
    feed.close()


@pytest.mark.usefixtures("_with_stand_ins")
def test_a_batch_of_very_large_images_takes_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchvision frees what was read; three buffers of such images would stay."""
    source, _ = open_folder(make_folder(tmp_path))
    contents = [torch.frombuffer(bytearray(source.content(index)), dtype=torch.uint8) for index in range(2)]
    sizes = np.array([source.size(index) for index in range(2)])
    decoder, bytes_ = on_device.OnDevice(CPU), 3 * int(sizes.prod(1).sum())
    for largest, calls in ((bytes_ - 1, 0), (bytes_, 1)):
        monkeypatch.setattr(on_device, "_LARGE", largest)
        assert len(decoder(contents, sizes, lambda number: torch.zeros(0))) == 2
        assert StandIns.made[0].calls == calls


@pytest.mark.usefixtures("_with_stand_ins")
def test_an_error_comes_behind_the_batches_before_it(tmp_path: Path) -> None:
    source, _ = open_folder(make_folder(tmp_path))
    source.path(4).write_bytes(b"")
    feed = Feed(source, train=False, image_size=16, loaders=1, decoding=Decoding("nvjpeg"))
    batches = feed(Request(0, torch.tensor([index])) for index in range(6))
    assert [next(batches)[1].item() for _ in range(4)] == [0, 0, 0, 1]
    with pytest.raises(DataError, match="cannot identify"):
        next(batches)
    feed.close()
    assert [made.closed for made in StandIns.made] == [True]


def test_one_ahead_keeps_what_came_before_an_error() -> None:
    def items() -> Any:
        yield 1
        yield 2
        raise ValueError("third")

    found = one_ahead(items())
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(ValueError, match="third"):
        next(found)


def test_a_note_says_who_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding("nvjpeg", why="Images are decoded by the GPU.")
    monkeypatch.delenv("BIGSTEP_NVJPEG_DECODERS", raising=False)
    assert _with_way(Decoding("pillow", why="By Pillow."), CPU).why == "By Pillow."
    said = "Images are decoded by the GPU. nvJPEG is called through torchvision: "
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert _with_way(decoding, CPU).why == f"{said}there is no GPU."
    monkeypatch.setattr(nvjpeg_decoders, "why_not_library", lambda device: None)
    for told, words in (
        ("", "directly, by 2 decoders."),
        ("2", "directly, by 2 decoders."),
        ("1", "directly, by 1 decoder."),
        ("0", "through torchvision: BIGSTEP_NVJPEG_DECODERS asks for no decoder."),
        ("many", "directly, by 2 decoders."),
    ):
        monkeypatch.setenv("BIGSTEP_NVJPEG_DECODERS", told)
        assert on_device.said_of(CPU) == f"nvJPEG is called {words}"


@pytest.mark.parametrize(
    ("told", "words"),
    [(None, "CUDA had already started with eight queues"), ("8", "CUDA_DEVICE_MAX_CONNECTIONS is 8"), ("32", "")],
)
def test_a_note_says_that_queues_are_few(told: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if told:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", told)
    assert words in on_device.said_of(CPU)
    assert bool(words) == (queues.why_few_queues() is not None)


class Driver:
    """CUDA's, of which nothing is loaded that was not there."""

    def __init__(self, name: str, mode: int, started: bool | None) -> None:
        assert (name, mode) == ("libcuda.so.1", os.RTLD_NOLOAD)
        if started is None:
            raise OSError
        self.cuDeviceGetCount = lambda count: 0 if started else 3


@pytest.mark.parametrize(
    ("started", "told", "expected"), [(None, None, "32"), (False, None, "32"), (False, "1", "1"), (True, None, None)]
)
def test_queues_are_asked_for_before_cuda_starts(
    started: bool | None, told: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", told or "")  # put back afterwards, whatever is set here
    if told is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(queues.ctypes, "CDLL", lambda name, mode: Driver(name, mode, started))
    queues.ask_for_queues()
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
