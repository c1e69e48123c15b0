"""Decoders: the same crops whoever decodes; kinds of files that decoders see differently all go one way."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from bigstep.data import open_data
from bigstep.data.augment import resized_crop_boxes
from bigstep.data.decode import snap
from bigstep.data.decoders import nvjpeg, pillow, turbo
from bigstep.data.decoders.base import Coded, Mixed
from bigstep.data.decoders.plain import plain_size, why_not_plain
from bigstep.data.feed import Feed, Request
from bigstep.data.sources.coded import Look
from bigstep.data.sources.folder import FolderImages, open_folder
from bigstep.data.view import Decoding
from bigstep.errors import DataError
from test_data_folder import make_folder, photograph
from test_data_pack import packed

CPU = torch.device("cpu")
GREY_LEVEL = 1 / 255 / 0.224  # of a normalised image


def by_pillow(contents: Sequence[Tensor], device: torch.device, again: Callable[[int], Tensor]) -> list[Tensor]:
    """Stand in for the GPU's decoders."""
    opened = [Image.open(io.BytesIO(content.numpy().tobytes())) for content in contents]
    assert all(image.mode == "RGB" for image in opened)
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1).to(device) for image in opened]


@pytest.fixture
def _decoded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvjpeg, "decode_on_device", by_pillow)


def odd_files(folder: Path) -> dict[str, str | None]:
    """Files of every kind, by name; why each is no plain JPEG."""
    tags = Image.Exif()
    tags[0x0112] = 6
    kinds: dict[str, tuple[Image.Image, dict[str, Any], str | None]] = {
        "plain.jpg": (photograph(40, 30), {}, None),
        "grey.jpg": (photograph(40, 30, mode="L"), {}, "grey"),
        "cmyk.jpg": (photograph(40, 30, mode="CMYK"), {}, "CMYK"),
        "progressive.jpg": (photograph(40, 30), {"progressive": True}, "progressive"),
        "turned.jpg": (photograph(40, 30), {"exif": tags}, "orientation"),
        "upright.jpg": (photograph(40, 30), {"exif": Image.Exif()}, None),
        "own.jpg": (photograph(40, 30), {"keep_rgb": True}, "red, green and blue"),
        "other.png": (photograph(40, 30), {}, "no JPEG"),
    }
    for name, (image, options, _) in kinds.items():
        image.save(folder / name, **options)
    (folder / "padded.jpg").write_bytes((folder / "plain.jpg").read_bytes() + b"\0\0")
    return {**{name: why for name, (_, _, why) in kinds.items()}, "padded.jpg": "does not end"}


def with_odd_files(root: Path) -> tuple[FolderImages, dict[str, str | None]]:
    make_folder(root)
    kinds = odd_files(root / "train" / "ant")
    return open_folder(root)[0], kinds


def read(source: FolderImages, indices: list[int], look: Look, share: float = 1.0) -> Coded:
    """Read a chunk as a thread does, for the device to decode the first `share` of it."""
    how = Mixed(share, "pillow", pinned=False)
    return nvjpeg.read(source, indices, look.draw(indices, 0, 0), how, memoryview(bytearray(100_000)))[0]


def test_only_plain_files_leave_pillow(tmp_path: Path) -> None:
    source, kinds = with_odd_files(tmp_path)
    for index, name in enumerate(source.files.tolist()):
        content = source.content(index)
        with source.open(index, content) as image:
            reason = why_not_plain(image, content)
        assert plain_size(content) == (source.size(index) if reason is None and "upright" not in str(name) else None)
        expected = kinds.get(Path(name.decode()).name)
        assert (reason is None) == (expected is None), name
        assert expected is None or expected in str(reason)


def test_a_header_is_read_as_pillow_reads_it_or_left_to_it() -> None:
    """Bytes of the header changed at random: whatever passes is plain, and as large as Pillow says."""
    content = io.BytesIO()
    photograph(40, 30).save(content, "JPEG", icc_profile=b"colours" * 9, comment=b"words")
    good = content.getvalue()
    assert plain_size(good) == plain_size(memoryview(good)) == (40, 30)
    assert [plain_size(good[:length]) for length in range(0, 200, 7)] == [None] * 29
    generator = np.random.default_rng(0)
    passed = 0
    for _ in range(1500):
        changed = bytearray(good)
        for place in generator.integers(2, 330, generator.integers(1, 3)):
            changed[place] = generator.choice([0, 1, 0xC0, 0xC2, 0xE1, 0xEE, 0xFF, generator.integers(256)])
        size = plain_size(changed)
        try:
            image = Image.open(io.BytesIO(changed), formats=["JPEG"])
        except Exception:  # noqa: S112 - the decoders refuse it, and Pillow then names it
            continue
        if size is not None:
            passed += 1
            assert size == image.size
            assert why_not_plain(image, bytes(changed)) is None
    assert passed > 300


@pytest.mark.usefixtures("_decoded_here")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("decoding", [Decoding("nvjpeg"), Decoding("both", share=0.5)], ids=lambda each: each.name)
def test_the_device_shows_what_pillow_shows(tmp_path: Path, train: bool, decoding: Decoding) -> None:
    """Files of every kind; the kernel does not round to grey levels, Pillow does twice: half a level in the mean."""
    source, _ = with_odd_files(tmp_path)
    order = torch.tensor([3, 14, 0, 7, 8, 2, 11, 5, 1, 9, 13, 10, 4, 6, 12])
    wanted = [Request(2, order[:4]), Request(2, order[4:].repeat(8)), Request(2, order[:1])]
    options: dict[str, Any] = {"train": train, "augment": "resized_crop", "seed": 3, "image_size": 48}
    # too large for Pillow to decode at half the size, which gives other pixels by itself
    usual = list(Feed(source, **options)(wanted))
    feed = Feed(source, decoding=decoding, loaders=1, **options)
    ours = list(feed(wanted))
    assert [len(x) for x, _ in ours] == [4, 88, 1]
    again = list(feed(wanted[:1]))
    feed.close()
    for (x, y), (u, v) in zip(usual, ours, strict=True):
        assert torch.equal(y, v)
        difference = (x - u).abs()
        assert difference.mean() < 0.5 * GREY_LEVEL
        assert difference.max() < 2.5 * GREY_LEVEL
    torch.testing.assert_close(again[0][0], ours[0][0], rtol=0, atol=2.5 * GREY_LEVEL)  # another may have decoded
    assert feed.spent()["device"] > 0
    assert feed.waits is None or feed.waits.thread["images"] == 4 + 88 + 1 + 4


@pytest.mark.usefixtures("_decoded_here")
def test_packed_files_give_the_device_the_same_bytes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    packed(folder, tmp_path / "out")
    packed(folder, tmp_path / "pixels", side=64, raw=True)
    options: dict[str, Any] = {
        "train": True,
        "augment": "resized_crop",
        "image_size": 16,
        "decoding": Decoding("nvjpeg"),
    }
    wanted = [Request(1, torch.arange(6))]
    sources = [open_data(kind, str(path)).train for kind, path in (("folder", folder), ("packed", tmp_path / "out"))]
    (x, _), (u, _) = (next(iter(Feed(source, **options)(wanted))) for source in sources)
    assert torch.equal(x, u)
    raw = open_data("packed", str(tmp_path / "pixels")).train
    assert next(iter(Feed(raw, **options)(wanted)))[0].shape == (6, 3, 16, 16)  # pixels need no decoder


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.usefixtures("_decoded_here")
def test_a_damaged_file_is_named_whoever_decodes(tmp_path: Path, loaders: int) -> None:
    source, _ = open_folder(make_folder(tmp_path))
    good = source.path(2).read_bytes()
    for bad, words in ((good[:-300], "image file is truncated"), (b"", "cannot identify image file")):
        source.path(2).write_bytes(bad)
        feed = Feed(source, train=False, image_size=16, loaders=loaders, decoding=Decoding("nvjpeg"))
        batches = feed([Request(0, torch.tensor([0])), Request(0, torch.tensor([1, 2]))])
        next(batches)
        with pytest.raises(DataError, match=words) as caught:
            next(batches)
        assert str(source.path(2)) in str(caught.value)
        feed.close()


def test_what_the_device_refuses_is_decoded_by_pillow_or_named(tmp_path: Path) -> None:
    source, _ = open_folder(make_folder(tmp_path))
    coded = read(source, [0, 1, 2], Look("centre", (8, 8)))
    feed = Feed(source, train=False, image_size=8, decoding=Decoding("nvjpeg"))
    assert coded.rows.tolist() == [0, 1, 2]
    contents = coded.files
    found = feed._way._jobs.whole(1, contents[1])  # type: ignore[attr-defined]
    with source.open(1) as image:
        assert torch.equal(found.permute(1, 2, 0), torch.from_numpy(np.array(image)))
    torn = contents[1][:-400].clone()
    with pytest.raises(DataError, match=r"ant/1\.JPEG cannot be decoded"):
        feed._way._jobs.whole(1, torn)  # type: ignore[attr-defined]


def test_only_the_file_that_the_device_refuses_is_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision does not tell which one it was."""
    calls: list[int] = []

    def decode_jpeg(contents: list[Tensor], mode: Any, device: Any) -> list[Tensor]:
        calls.append(len(contents))
        if any(content[0] in (5, 11) for content in contents):
            raise RuntimeError("Failed to decode batch")
        return contents

    class Stream:
        def synchronize(self) -> None:
            calls.append(0)

    monkeypatch.setattr(nvjpeg, "jpeg_decoder", lambda: (decode_jpeg, None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    files = [torch.tensor([number]) for number in range(16)]
    found = nvjpeg.decode_on_device(files, CPU, lambda number: torch.tensor([100 + number]))
    assert [image.item() for image in found] == [0, 1, 2, 3, 4, 105, 6, 7, 8, 9, 10, 111, 12, 13, 14, 15]
    assert calls[::2] == [0] * (len(calls) // 2)  # drained before each call
    assert len(calls) == 2 * 15


@pytest.mark.usefixtures("_decoded_here")
def test_an_unfinished_pass_ends_the_thread(tmp_path: Path) -> None:
    source, _ = open_folder(make_folder(tmp_path))
    feed = Feed(source, train=False, image_size=8, decoding=Decoding("nvjpeg"))
    batches = feed(Request(0, torch.tensor([n % 6])) for n in range(100))
    next(batches)
    feed.close()
    found = list(feed([Request(0, torch.tensor([4, 1]))]))
    assert found[0][1].tolist() == [1, 0]


@pytest.mark.skipif(nvjpeg.why_not_torchvision() is not None, reason=f"{nvjpeg.why_not_torchvision()}")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pytest forgets the filter that the decoder sets
@pytest.mark.parametrize("crop", ["random", "centre"])
def test_torchvision_shows_what_pillow_shows(tmp_path: Path, crop: Any) -> None:
    source, _ = with_odd_files(tmp_path)
    everything = list(range(len(source)))
    look = Look(crop, (48, 48))
    draw = look.draw(everything, 1, 2)
    usual = (
        source.load_random_crops(everything, 48, 1, 2, 0.08) if crop == "random" else source.load_crops(everything, 48)
    )
    found, spent = turbo.load(source, everything, draw)
    assert found.shape == usual.shape
    assert (found.int() - usual.int()).abs().float().mean() < 0.5
    assert spent.decode_s > 0


@pytest.mark.parametrize("crop", ["random", "centre"])
def test_a_decoder_of_whole_images_shows_what_pillow_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crop: Any
) -> None:
    """With Pillow in the place of torchvision's decoder, whose pixels lie as they do here: the rest is the same."""

    def decode_jpeg(content: Tensor, mode: Any) -> Tensor:
        image = Image.open(io.BytesIO(content.numpy().tobytes()))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    monkeypatch.setattr(turbo, "jpeg_decoder", lambda: (decode_jpeg, None))
    source, _ = with_odd_files(tmp_path)
    everything, look = list(range(len(source))), Look(crop, (48, 48))
    usual = pillow.load(source, everything, look.draw(everything, 1, 2))[0]
    assert torch.equal(turbo.load(source, everything, look.draw(everything, 1, 2))[0], usual)
    how = Mixed(0.0, "torchvision", pinned=False)
    coded, _ = nvjpeg.read(source, everything, look.draw(everything, 1, 2), how, memoryview(bytearray(9)))
    assert torch.equal(coded.pixels.permute(0, 3, 1, 2), usual)
    assert not coded.files


def test_a_chunk_for_the_device_holds_every_image_once(tmp_path: Path) -> None:
    source, kinds = with_odd_files(tmp_path)
    everything = list(range(len(source)))
    coded = read(source, everything, Look("random", (48, 48)))
    assert isinstance(coded, Coded)
    plain = [index for index in everything if kinds.get(source.path(index).name) is None]
    assert coded.rows.tolist() == plain
    assert len(coded.pixels) == len(everything) - len(plain)
    sizes = torch.tensor([source.size(index) for index in everything])
    drawn = resized_crop_boxes(torch.tensor(everything), 0, 0, sizes[:, 1], sizes[:, 0])  # as Pillow's path draws them
    for place, row in enumerate(plain):
        x, y, w, h = drawn[:, row].tolist()
        assert tuple(coded.bounds[place]) == snap((x, y, x + w, y + h), source.size(row))
    for row, content in zip(plain, coded.files, strict=True):
        assert content.numpy().tobytes() == source.content(row)
    for share, count in ((0.0, 0), (0.5, round(0.5 * len(plain))), (0.99, len(plain))):
        part = read(source, everything, Look("random", (48, 48)), share)
        assert part.rows.tolist() == plain[:count]
        others = [index for index in everything if index not in plain[:count]]
        usual = source.load_random_crops(others, 48, 0, 0, 0.08)
        assert torch.equal(part.pixels.permute(0, 3, 1, 2), usual)  # by Pillow, as without a device


@pytest.mark.gpu
@pytest.mark.skipif(nvjpeg.why_not_torchvision() is not None, reason=f"{nvjpeg.why_not_torchvision()}")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("decoders", ["0", "2"])  # through torchvision, and directly
@pytest.mark.parametrize("train", [True, False])
def test_a_gpu_decodes_what_pillow_decodes_beside_work_of_its_own(
    tmp_path: Path, train: bool, decoders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is freed while queued work still reads it is what the decoders would overwrite.

    Colour is stored at the full size: half of it, blown up, looks different by decoder.
    """
    monkeypatch.setenv("BIGSTEP_NVJPEG_DECODERS", decoders)
    source, kinds = with_odd_files(tmp_path)
    for index in range(len(source)):
        if kinds.get(source.path(index).name) is None:
            Image.open(source.path(index)).save(source.path(index), "JPEG", quality=95, subsampling=0)
    order = torch.arange(len(source)).repeat(20)
    wanted = [Request(epoch, order) for epoch in range(10)]
    options: dict[str, Any] = {"train": train, "augment": "resized_crop", "seed": 3, "image_size": 48}
    usual = list(Feed(source, **options)(wanted))
    for decoding in (Decoding("nvjpeg"), Decoding("both", share=0.5)):
        feed = Feed(source, device="cuda", loaders=2, decoding=decoding, **options)
        busy = torch.randn(2048, 2048, device="cuda")
        for (x, _), (u, _) in zip(usual, feed(wanted), strict=True):
            for _ in range(10):
                busy = torch.tanh(busy @ busy)
            difference = (x - u.cpu()).abs().mean((1, 2, 3))
            assert difference.max() < GREY_LEVEL  # of any image: rounding, here and in the decoders
        feed.close()
        assert feed.waits is not None
        assert len(feed.waits.take(len(feed.waits))) == len(wanted)


@pytest.mark.gpu
@pytest.mark.skipif(nvjpeg.why_not_torchvision() is not None, reason=f"{nvjpeg.why_not_torchvision()}")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("train", [True, False])
def test_colour_of_half_the_size_is_within_a_grey_level(tmp_path: Path, train: bool) -> None:
    """The GPU's decoders repeat the stored colour, libjpeg smooths it.

    By libjpeg without smoothing that is 0.5 grey levels in such crops, 0.3 in those of photographs and 0.8 in the worst
    of them; in pictures as small as the other tests have, of which every pixel has a colour of its own, it is 2 to 6.
    """
    folder = make_folder(tmp_path)
    for number, path in enumerate(sorted(folder.glob("*/*/*.JPEG"))):
        photograph(400, 300, seed=number).save(path, quality=95)
    source, _ = open_folder(folder)
    wanted = [Request(0, torch.arange(6))]
    options: dict[str, Any] = {"train": train, "augment": "resized_crop", "image_size": 224}
    usual, ours = (
        next(iter(Feed(source, **options, **where)(wanted)))[0].cpu()
        for where in ({}, {"device": "cuda", "decoding": Decoding("nvjpeg")})
    )
    difference = (usual - ours).abs().mean((1, 2, 3)) / GREY_LEVEL
    assert 0 < difference.max() < 1
