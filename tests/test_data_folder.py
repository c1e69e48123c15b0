"""Folders of image files: found in order, decoded small, cut alike every time, refused by name."""

from __future__ import annotations

import io
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bigstep.data.catalog import open_data
from bigstep.data.decode import centre_box, cut, cut_fast, open_image
from bigstep.data.rectangles import rectangle_of, rectangular_batches
from bigstep.data.sources import coded, folder
from bigstep.data.sources.folder import open_folder, scan_folder
from bigstep.data.view import View
from bigstep.errors import DataError


def photograph(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A smooth picture: noise blown up, so that JPEG and resampling keep it nearly unchanged."""
    rng = np.random.default_rng(seed)
    channels = len(mode) if mode in ("RGB", "RGBA", "CMYK", "LA") else 1
    coarse = rng.integers(0, 256, (6, 8, channels), dtype=np.uint8)
    bands = [Image.fromarray(coarse[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(channels)]
    return bands[0] if channels == 1 else Image.merge(mode, bands)


def make_folder(root: Path, per_class: int = 3, classes: tuple[str, ...] = ("ant", "bee")) -> Path:
    for split in ("train", "val"):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for n in range(per_class):
                width, height = [(96, 64), (64, 96), (80, 80)][n % 3]
                photograph(width, height, seed=10 * label + n).save(root / split / name / f"{n}.JPEG", quality=95)
    return root


def test_files_are_found_in_sorted_order_and_others_are_left_alone(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "train" / "ant" / "readme.txt").write_text("not an image")
    (tmp_path / "train" / "ant" / ".hidden.JPEG").write_bytes(b"")
    (tmp_path / "train" / "notes.txt").write_text("not a class")
    train, test = open_folder(tmp_path)
    assert train.files.tolist() == [
        b"ant/0.JPEG",
        b"ant/1.JPEG",
        b"ant/2.JPEG",
        b"bee/0.JPEG",
        b"bee/1.JPEG",
        b"bee/2.JPEG",
    ]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.classes == test.classes == ("ant", "bee")
    assert train.path(4) == tmp_path / "train" / "bee" / "1.JPEG"
    part = train.subset(torch.tensor([5, 0]))
    assert part.labels.tolist() == [1, 0]
    assert part.path(0).name == "2.JPEG"


def test_holding_out_works_on_folders(tmp_path: Path) -> None:
    pair = open_data("folder", str(make_folder(tmp_path)), holdout=0.34)
    assert pair.test.labels.tolist() == [0, 1]
    assert len(pair.train) == 4
    assert pair.test.root.name == "train"
    shutil.rmtree(tmp_path / "val")
    assert open_data("folder", str(tmp_path), holdout=0.34).fingerprint() == pair.fingerprint()
    with pytest.raises(DataError, match=r"has no val beside train.*data\.holdout"):
        open_data("folder", str(tmp_path))


def test_a_pipe_is_no_image_and_a_link_to_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    root = make_folder(tmp_path) / "train"
    before = len(scan_folder(root))
    os.mkfifo(root / "ant" / "pipe.jpg")  # reading it would wait for ever
    assert len(scan_folder(root)) == before
    (root / "ant" / "gone.jpg").symlink_to("nowhere.jpg")
    assert len(scan_folder(root)) == before + 1, "it is told when it is read, as a file that vanishes"


def test_a_class_that_is_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    """A disk that is not there must not leave a class out in silence."""
    make_folder(tmp_path)
    for part in ("train", "val"):
        (tmp_path / part / "cow").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="train/cow is a link to nowhere"):
        open_folder(tmp_path)
    shutil.copytree(tmp_path / "train" / "ant", tmp_path / "elsewhere")
    assert open_folder(tmp_path)[0].classes == ("ant", "bee", "cow")


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_every_kind_of_jpeg_becomes_rgb(tmp_path: Path, mode: str) -> None:
    picture = photograph(64, 48, mode=mode)
    picture.save(tmp_path / "x.jpeg", quality=98)
    with open_image(tmp_path / "x.jpeg") as image:
        found = cut(image, (0, 0, 64, 48), (64, 48)).astype(int)
    assert np.abs(found - np.asarray(picture.convert("RGB")).astype(int)).mean() < 4  # what JPEG loses


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "1"])
def test_every_kind_of_png_becomes_rgb(tmp_path: Path, mode: str) -> None:
    base = photograph(64, 48)
    picture = base.convert(mode) if mode != "LA" else base.convert("L").convert("LA")
    options = {"transparency": bytes(range(256))} if mode == "P" else {}
    picture.save(tmp_path / "x.png", **options)
    expected = np.asarray(picture.convert("RGBA").convert("RGB"))
    with open_image(tmp_path / "x.png") as image:
        assert np.array_equal(cut(image, (0, 0, 64, 48), (64, 48)), expected)


def test_reduced_decoding_gives_what_full_decoding_gives(tmp_path: Path) -> None:
    picture = photograph(800, 600)
    picture.save(tmp_path / "x.jpeg", quality=95)
    box = (101.5, 50.25, 701.5, 550.25)
    expected = picture.resize((70, 60), Image.Resampling.BILINEAR, box=box)
    with open_image(tmp_path / "x.jpeg") as image:
        found = cut(image, box, (70, 60))
        assert image.width == 100  # decoded at an eighth
    error = np.abs(found.astype(int) - np.asarray(expected).astype(int))
    assert error.mean() < 2  # levels of 255: JPEG's loss and another order of averaging


@pytest.mark.parametrize("box", [(11, 5, 121, 105), (40, 30, 72, 62), (0, 0, 126, 94)])
def test_the_fast_cut_is_a_crop_and_then_a_resize(tmp_path: Path, box: tuple[int, int, int, int]) -> None:
    picture = photograph(192, 144)
    picture.save(tmp_path / "x.png")
    with open_image(tmp_path / "x.png") as image:
        found = cut_fast(image, box, (64, 48)).numpy().astype(int)
    expected = np.asarray(picture.crop(box).resize((64, 48), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(found - expected).max() <= 1  # Pillow and torch round weights and sums apart


def test_the_fast_cut_moves_a_box_by_less_than_a_pixel_and_keeps_it_inside(tmp_path: Path) -> None:
    picture = photograph(64, 48)
    picture.save(tmp_path / "x.png")
    for box, whole in [((3.4, 2.6, 35.4, 34.6), (3, 3, 35, 35)), ((63.8, 47.9, 64.0, 48.0), (63, 47, 64, 48))]:
        with open_image(tmp_path / "x.png") as image:
            found = cut_fast(image, box, (whole[2] - whole[0], whole[3] - whole[1]))
        assert np.array_equal(found.numpy(), np.asarray(picture.crop(whole)))


def test_a_plain_file_is_opened_once_for_its_size_and_its_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is read by hand for the size; opening it for that would take a tenth of the time."""
    train, _ = open_folder(make_folder(tmp_path))
    expected, opened = train.load_crops([0, 1, 2], 16), []
    opens = folder.open_image
    monkeypatch.setattr(folder, "open_image", lambda path, content: (opened.append(path), opens(path, content))[1])
    assert torch.equal(train.load_crops([0, 1, 2], 16), expected)
    assert opened == [train.path(index) for index in range(3)]


def test_orientation_tags_are_ignored(tmp_path: Path) -> None:
    picture = photograph(64, 48)
    tags = Image.Exif()
    tags[0x0112] = 6  # "turn me by 90 degrees"
    picture.save(tmp_path / "turned.jpeg", exif=tags)
    with open_image(tmp_path / "turned.jpeg") as image:
        assert image.size == (64, 48)


def test_evaluation_crop_is_resize_then_centre_crop(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "ant"
    folder.mkdir(parents=True)
    picture = photograph(384, 256)
    picture.save(folder / "x.png")
    found = scan_folder(tmp_path / "set").load_crops([0], 224)[0].permute(1, 2, 0).numpy().astype(int)
    expected = np.asarray(picture.crop((80, 16, 304, 240))).astype(int)  # 256 is 224 / 0.875: no resizing is left
    assert np.abs(found - expected).max() <= 1
    assert centre_box(384, 256) == (80, 16, 304, 240)


def test_random_crops_depend_on_seed_epoch_and_index_alone(tmp_path: Path) -> None:
    train, _ = open_folder(make_folder(tmp_path))
    whole = train.load_random_crops([0, 1, 2, 3], 32, seed=1, epoch=2, min_scale=0.2)
    assert torch.equal(train.load_random_crops([3, 1], 32, 1, 2, 0.2), whole[[3, 1]])
    assert not torch.equal(train.load_random_crops([0], 32, 1, 3, 0.2)[0], whole[0])
    assert not torch.equal(train.load_random_crops([0], 32, 2, 2, 0.2)[0], whole[0])


def test_rectangles_hold_every_sample_once_and_one_shape_a_batch(tmp_path: Path) -> None:
    _, test = open_folder(make_folder(tmp_path, per_class=7))
    batches = rectangular_batches(test.sizes, 64, batch=4)
    assert sorted(torch.cat(batches).tolist()) == list(range(14))
    for batch in batches:
        assert len(batch) <= 4
        shapes = {rectangle_of(*test.sizes[index].tolist(), 64) for index in batch.tolist()}
        assert len(shapes) == 1
        images = test.load_rectangles(batch.tolist(), shapes.copy().pop())
        assert images.shape[1:] == (3, *reversed(shapes.pop()))
    assert {tuple(s) for s in test.sizes.tolist()} == {(96, 64), (64, 96), (80, 80)}


def test_a_gpu_evaluates_fewer_images_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it computes on is not far ahead of what it decodes."""
    monkeypatch.setattr(coded, "_EVALUATED_AT_ONCE", 2)
    source = open_folder(make_folder(tmp_path))[1]
    for device, most in (("cuda", 2), ("cpu", 100)):
        batches = source.batches(100, View(train=False, image_size=16, device=torch.device(device)))
        assert max(map(len, batches)) == min(most, len(source))
        assert torch.equal(torch.cat(batches), torch.arange(len(source)))


def test_a_whole_image_is_evaluated_whole(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "ant"
    folder.mkdir(parents=True)
    picture = photograph(96, 64)
    picture.save(folder / "x.png")
    assert rectangle_of(96, 64, 64) == (96, 64)
    found = scan_folder(tmp_path / "set").load_rectangles([0], (96, 64))[0]
    assert np.array_equal(found.permute(1, 2, 0).numpy(), np.asarray(picture))


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def sixteen_bit() -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint16)).save(content, "PNG")
    return content.getvalue()


def jpeg() -> bytes:
    content = io.BytesIO()
    photograph(96, 64).save(content, "JPEG", quality=95)
    return content.getvalue()


BAD_IMAGES = {
    "truncated.JPEG": (jpeg()[:-400], "truncated"),
    "empty.JPEG": (b"", "cannot identify image file"),
    "text.JPEG": (b"<html>404</html>", "cannot identify image file"),
    "large.png": (png_of(9000, 9000), "9000 x 9000 pixels, more than"),
    "larger.png": (png_of(12000, 10000), "more than the 67,108,864 pixels"),
    "bomb.png": (png_of(60000, 60000), "more than the 67,108,864 pixels"),
    "thin.png": (png_of(64, 64), "cannot be decoded"),
    "deep.png": (sixteen_bit(), "pixels of type I;16"),
    "head.JPEG": (jpeg()[:20], "cannot be decoded"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_is_named_when_it_is_hit(tmp_path: Path, name: str) -> None:
    content, sentence = BAD_IMAGES[name]
    make_folder(tmp_path)
    (tmp_path / "train" / "bee" / name).write_bytes(content)
    train, _ = open_folder(tmp_path)
    index = train.files.tolist().index(f"bee/{name}".encode())
    with pytest.raises(DataError, match=sentence) as caught:
        train.load_crops([0, index], 32)
    assert str(tmp_path / "train" / "bee" / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    train, _ = open_folder(make_folder(tmp_path))
    train.path(1).unlink()
    with pytest.raises(DataError, match=r"ant/1\.JPEG cannot be decoded: No such file"):
        train.load_crops([0, 1], 32)


def test_bad_folders_are_named(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "set")
    with pytest.raises(DataError, match="nowhere/train cannot be read: No such file or directory"):
        open_data("imagenet", str(tmp_path / "nowhere"))
    (root / "val" / "cow").mkdir()
    with pytest.raises(DataError, match="val/cow holds no images"):
        open_folder(root)
    photograph(20, 20).save(root / "val" / "cow" / "1.JPEG")
    with pytest.raises(DataError, match="val/cow has no counterpart in .*train"):
        open_folder(root)
    (tmp_path / "flat" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="flat/train holds no class folders"):
        open_folder(tmp_path / "flat")
    with pytest.raises(DataError, match=r"needs data\.path"):
        open_data("imagenet")
