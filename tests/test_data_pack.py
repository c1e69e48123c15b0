"""Packed images: the same samples as the folder, any of them at once; interrupted packing goes on, damage is named."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bigstep.data import open_data, pack
from bigstep.data.command import pack_command
from bigstep.data.feed import Feed, Request
from bigstep.data.inspect import describe
from bigstep.data.names import Packing, name_of_set
from bigstep.data.sources.packed import RECORD
from bigstep.errors import ConfigError, DataError
from test_data_folder import make_folder


def packed(folder: Path, out: Path, said: list[str] | None = None, **options: Any) -> dict[str, Any]:
    say: Callable[[str], None] = (lambda line: None) if said is None else said.append
    return pack_command(str(folder), Packing(out=out, say=say, **options), vocabulary="bytes")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tar files of a few images each."""
    monkeypatch.setattr(pack, "_SHARD_BYTES", 12_000)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("small_shards")
def test_packed_images_are_the_samples_of_the_folder_byte_for_byte(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set", per_class=5)
    facts = packed(folder, tmp_path / "out")
    assert facts["images"] == 20
    assert name_of_set(str(tmp_path / "out")) == ("packed", str(tmp_path / "out"))
    before, after = open_data("folder", str(folder)), open_data("packed", str(tmp_path / "out"))
    assert len(after.train.shards) > 1
    for a, b in ((before.train, after.train), (before.test, after.test)):
        assert a.classes == b.classes
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.sizes, b.sizes)
        everything = list(range(len(a)))
        assert torch.equal(a.load_crops(everything, 32), b.load_crops(everything, 32))
        assert torch.equal(
            a.load_random_crops(everything, 32, 1, 2, 0.1), b.load_random_crops(everything, 32, 1, 2, 0.1)
        )
    wanted = [Request(3, torch.tensor([7, 0, 2])), Request(3, torch.tensor([9]))]
    options: dict[str, Any] = {"train": True, "augment": "resized_crop", "seed": 1, "image_size": 32}
    feeds = [Feed(before.train, **options), Feed(after.train, **options), Feed(after.train, loaders=2, **options)]
    found = [list(feed(wanted)) for feed in feeds]
    feeds[2].close()
    for batches in found[1:]:
        for (x, y), (u, v) in zip(found[0], batches, strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
    whole = Feed(after.test, train=False, image_size=64, rectangular=True).evaluation_batches(3)
    assert all(
        map(torch.equal, whole, Feed(before.test, train=False, image_size=64, rectangular=True).evaluation_batches(3))
    )
    part = after.train.subset(torch.tensor([8, 1]))
    assert torch.equal(part.load_crops([0, 1], 32), before.train.load_crops([8, 1], 32))


def test_the_tar_files_are_plain_webdataset(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    packed(folder, tmp_path / "out")
    source = open_data("folder", str(folder)).train
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    assert sorted(members) == sorted(f"{n:08d}.{suffix}" for n in range(6) for suffix in ("jpg", "cls"))
    for index in range(6):
        assert members[f"{index:08d}.jpg"] == source.path(index).read_bytes()
        assert int(members[f"{index:08d}.cls"]) == source.labels[index]


@pytest.mark.parametrize("raw", [False, True])
def test_images_are_shrunk_to_a_side_but_never_enlarged(tmp_path: Path, raw: bool) -> None:
    folder = make_folder(tmp_path / "set")
    packed(folder, tmp_path / "out", side=64, raw=raw)
    before, after = open_data("folder", str(folder)).train, open_data("packed", str(tmp_path / "out")).train
    for index in range(6):
        width, height = before.size(index)
        assert min(after.size(index)) == min(64, width, height)
        assert after.size(index)[0] / after.size(index)[1] == pytest.approx(width / height, rel=0.02)
    everything = list(range(6))
    difference = (before.load_crops(everything, 32).int() - after.load_crops(everything, 32).int()).abs().float()
    assert difference.mean() < 6  # grey levels: resampled twice, and for one of the two compressed anew
    if raw:
        with after.open(0) as image:
            again = np.asarray(image)
        with before.open(0) as image:
            assert again.shape == (after.size(0)[1], after.size(0)[0], 3)
    kept = tmp_path / "kept"
    packed(folder, kept, side=4000)
    assert torch.equal(
        open_data("packed", str(kept)).train.load_crops(everything, 32), before.load_crops(everything, 32)
    )


@pytest.mark.usefixtures("small_shards")
def test_interrupted_packing_goes_on_behind_the_last_complete_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "set", per_class=8)
    packed(folder, tmp_path / "whole")
    out, replaced, encoded = tmp_path / "out", [], []
    replace, encode = os.replace, pack._encode

    def full_disk(source: Any, target: Any) -> None:
        if str(target).endswith(".tar"):
            replaced.append(target)
            if len(replaced) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(DataError, match=r"out cannot be written: No space left on device.*the same command continues"):
        packed(folder, out)
    assert not list(out.glob(".*.part"))
    with pytest.raises(DataError, match=r"index\.json cannot be read"):
        open_data("packed", str(out))  # half a pack is none
    monkeypatch.setattr(os, "replace", replace)
    (out / "train-000001.tar").write_bytes(b"torn")  # what a power cut may leave
    monkeypatch.setattr(pack, "_encode", lambda path, *how: (encoded.append(path), encode(path, *how))[1])
    said: list[str] = []
    packed(folder, out, said)
    assert not any(line.startswith("train-000000") for line in said)
    assert any(line.startswith("train-000001") for line in said)
    first = json.loads((out / "index.json").read_text())["splits"]["train"]["shards"][0]["bytes"]
    assert first > 0
    assert folder / "train" / "ant" / "0.JPEG" not in encoded
    assert content_of(out) == content_of(tmp_path / "whole")  # the same bytes as without an interruption
    assert packed(folder, out)["images"] == 32  # once more changes nothing
    assert content_of(out) == content_of(tmp_path / "whole")


SLOW_PACKER = """
import sys, time
from pathlib import Path
from bigstep.data import pack
from bigstep.data.names import Packing, Wanted
pack._SHARD_BYTES, pack._GROUP, encode = 12_000, 2, pack._encode
pack._encode = lambda *how: (time.sleep(0.05), encode(*how))[1]
pack.pack_folder(Wanted(name="folder", path=sys.argv[1]), Packing(out=Path(sys.argv[2])))
"""


@pytest.mark.usefixtures("small_shards")
def test_a_packer_that_was_killed_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "set", per_class=12), tmp_path / "out"
    packer = subprocess.Popen([sys.executable, "-u", "-c", SLOW_PACKER, str(folder), str(out)], stdout=subprocess.PIPE)
    assert packer.stdout is not None
    packer.stdout.readline()  # a tar file is complete, the next one is being written
    packer.kill()
    packer.communicate()
    assert (out / "train-000000.tar").exists()
    assert not (out / "index.json").exists()
    said: list[str] = []
    packed(folder, out, said)
    assert not any(line.startswith("train-000000") for line in said)
    packed(folder, tmp_path / "whole")
    assert content_of(out) == content_of(tmp_path / "whole")


def test_packing_harms_nothing_that_is_there(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    with pytest.raises(ConfigError, match="mine is not empty.*name a new folder"):
        packed(folder, tmp_path / "mine")
    assert content_of(tmp_path / "mine") == {"thesis.txt": b"do not touch"}
    packed(folder, tmp_path / "out")
    before = content_of(tmp_path / "out")
    with pytest.raises(ConfigError, match="no pack of the same images and options"):
        packed(folder, tmp_path / "out", side=40)
    (folder / "train" / "ant" / "new.JPEG").write_bytes((folder / "train" / "ant" / "0.JPEG").read_bytes())
    with pytest.raises(ConfigError, match="no pack of the same images and options"):
        packed(folder, tmp_path / "out")
    assert content_of(tmp_path / "out") == before
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"out cannot be written: Not a directory; name another folder\.$"):
        packed(folder, tmp_path / "file" / "out")
    with pytest.raises(DataError, match=r"file cannot be written: File exists; name another folder\.$"):
        packed(folder, tmp_path / "file")
    with pytest.raises(ConfigError, match="--raw stores pixels, so it needs --side"):
        packed(folder, tmp_path / "other", raw=True)
    with pytest.raises(ConfigError, match="embedded cannot be packed"):
        pack_command("embedded", Packing(out=tmp_path / "other"), vocabulary="bytes")
    assert not (tmp_path / "other").exists()


def test_a_damaged_file_is_named_while_it_is_packed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    path = folder / "train" / "bee" / "1.JPEG"
    good = path.read_bytes()
    path.write_bytes(good[:-200])
    with pytest.raises(DataError, match=r"bee/1\.JPEG cannot be decoded"):
        packed(folder, tmp_path / "out")
    path.write_bytes(good)
    shutil.rmtree(tmp_path / "out")  # the folder has changed since
    assert packed(folder, tmp_path / "out")["images"] == 12


def test_a_flipped_byte_is_named_by_its_image(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    packed(folder, tmp_path / "out")
    source = open_data("packed", str(tmp_path / "out")).train
    path = tmp_path / "out" / "train-000000.tar"
    content = bytearray(path.read_bytes())
    content[int(source.records[4]["offset"]) + 300] ^= 1
    path.write_bytes(content)
    damaged = open_data("packed", str(tmp_path / "out")).train
    damaged.load_crops([0, 1, 2, 3, 5], 16)
    with pytest.raises(DataError, match=r"train-000000\.tar \(bee/1\.JPEG\) does not have its checksum"):
        damaged.load_crops([4], 16)
    facts = describe(str(tmp_path / "out"), verify=True)
    assert [row["file"] for row in facts["train"]["corrupt"]] == [f"{path} (bee/1.JPEG)"]


def test_a_bad_index_is_one_sentence(tmp_path: Path) -> None:
    packed(make_folder(tmp_path / "set"), tmp_path / "out")
    index = tmp_path / "out" / "index.json"
    head = json.loads(index.read_text())

    def refused(sentence: str) -> None:
        with pytest.raises(DataError, match=sentence) as caught:
            open_data("packed", str(tmp_path / "out"))
        assert "\n" not in str(caught.value)

    for wrong in (
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({**head, "format": "other"}),
        json.dumps({**head, "splits": 3}),
    ):
        index.write_text(wrong)
        refused("not an index that `bigstep data pack` wrote")
    outside = json.loads(json.dumps(head).replace("train-000000.tar", "../set/train/ant/0.JPEG"))
    index.write_text(json.dumps(outside))
    refused(r"out/0\.JPEG cannot be read: No such file")  # never outside of the folder
    index.write_text(json.dumps(head))
    records = tmp_path / "out" / "train-records.npy"
    good = np.load(records)
    for field, value in (
        ("shard", 9),
        ("label", 2),
        ("offset", 2**40),
        ("width", 0),
        ("width", 2**31),
        ("size", 2**31),
    ):
        changed = good.copy()
        changed[field][3] = value
        content = io.BytesIO()
        np.save(content, changed)
        records.write_bytes(content.getvalue())
        refused("train-records.npy does not have its checksum")
        told = json.loads(json.dumps(head))
        told["splits"]["train"]["sha256"] = hashlib.sha256(content.getvalue()).hexdigest()
        index.write_text(json.dumps(told))
        refused("not an index that `bigstep data pack` wrote")
        index.write_text(json.dumps(head))
    np.save(records, good)
    assert good.dtype == RECORD
    tar = tmp_path / "out" / "val-000000.tar"
    tar.write_bytes(tar.read_bytes()[:-512])
    refused(r"val-000000\.tar has .* bytes, but should have")
    tar.unlink()
    refused(r"val-000000\.tar cannot be read: No such file")


def test_a_text_is_packed_into_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"to be or not to be. " * 100)
    out = tmp_path / "text.tokens"
    facts = pack_command(str(tmp_path / "text.txt"), Packing(out=out), vocabulary="words:300")
    assert facts["vocabulary"].startswith("words")
    one, other = (open_data(kind, str(path), length=8, vocabulary="words:300") for kind, path in
                  (("text", tmp_path / "text.txt"), ("tokens", out)))  # fmt: skip
    assert one.fingerprint() == other.fingerprint()
    for options, sentence in [
        ({"out": out}, "exists already"),
        ({"out": tmp_path / "text.bin"}, r"must end in \.tokens"),
        ({"out": tmp_path / "b.tokens", "side": 3}, "--side and --raw are for images"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            pack_command(str(tmp_path / "text.txt"), Packing(**options), vocabulary="bytes")


def test_images_of_every_kind_are_packed_as_they_are(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    for suffix, mode in (("png", "P"), ("webp", "RGB"), ("bmp", "L"), ("jpg", "CMYK"), ("png", "RGBA")):
        Image.new(mode, (40, 30)).save(folder / "train" / "ant" / f"{mode}.{suffix}")
    packed(folder, tmp_path / "out")
    before, after = open_data("folder", str(folder)).train, open_data("packed", str(tmp_path / "out")).train
    everything = list(range(len(before)))
    assert torch.equal(before.load_crops(everything, 16), after.load_crops(everything, 16))
