"""Packing against the odds: odd files and folders, two packers, changes on the way, bytes flipped beside the images."""

from __future__ import annotations

import errno
import itertools
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bigstep.cli import main
from bigstep.data import open_data, pack
from bigstep.data.command import pack_command
from bigstep.data.inspect import describe
from bigstep.data.names import Packing, Wanted, name_of_set
from bigstep.data.sources import folder as folders
from bigstep.errors import ConfigError, DataError
from test_data_folder import make_folder, photograph
from test_data_pack import content_of, packed

pytestmark = pytest.mark.usefixtures("small_shards")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tar files of a few images each."""
    monkeypatch.setattr(pack, "_SHARD_BYTES", 12_000)


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """A disk that has room for so many tar files."""
    replace, seen = os.replace, itertools.count()

    def full(source: Any, target: Any) -> None:
        if str(target).endswith(".tar") and next(seen) == after:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(DataError, match="No space left on device"):
            yield


@pytest.mark.parametrize("side", [0, 48])
def test_a_jpeg_with_more_pictures_behind_it_is_one_image(tmp_path: Path, side: int) -> None:
    """As some cameras and telephones write it; Pillow calls it MPO."""
    folder = make_folder(tmp_path / "set")
    path = folder / "train" / "ant" / "3.jpg"
    photograph(96, 64, seed=7).save(path, "MPO", quality=95, save_all=True, append_images=[photograph(96, 64, seed=8)])
    with Image.open(path) as image:
        assert image.format == "MPO"
    packed(folder, tmp_path / "out", side=side)
    before, after = open_data("folder", str(folder)).train, open_data("packed", str(tmp_path / "out")).train
    index = 3
    difference = before.load_crops([index], 32).int() - after.load_crops([index], 32).int()
    assert difference.abs().float().mean() < (6 if side else 1e-9)  # grey levels: compressed anew, or the same bytes
    with tarfile.open(tmp_path / "out" / after.shards[after.records[index]["shard"]]) as tar:
        assert f"{index:08d}.jpg" in tar.getnames()


def test_one_process_packs_into_a_folder_at_a_time(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "set"), tmp_path / "out"
    out.mkdir()
    with pack._alone(out):
        with pytest.raises(ConfigError, match="Another process is packing into .*out; wait until it ends"):
            packed(folder, out)
        assert list(content_of(out)) == [pack.LOCK]
    assert not content_of(out)
    packed(folder, out)
    assert pack.LOCK not in content_of(out)


@pytest.mark.parametrize("where", ["train/out", "val/ant/out", "train"])
def test_no_class_is_packed_into(tmp_path: Path, where: str) -> None:
    """Packing that is interrupted would take its own folder for a class, and go on no more."""
    folder = make_folder(tmp_path / "set")
    with pytest.raises(ConfigError, match="lies in .*, where every folder is a class; name one elsewhere"):
        packed(folder, folder / where)
    assert not (folder / where / "pack.json").exists()
    assert packed(folder, folder / "out")["images"] == 12  # beside train and val it harms nothing
    assert name_of_set(str(folder))[0] == "folder"


def test_a_file_that_changes_on_the_way_is_no_half_of_a_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_LOOKED_AT", 2)  # of many files a fingerprint of a set looks at few
    folder, out = make_folder(tmp_path / "set", per_class=8), tmp_path / "out"
    with full_disk(after=2):
        packed(folder, out)
    path = folder / "train" / "ant" / "1.JPEG"  # which is packed already
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ConfigError, match="no pack of the same images and options"):
        packed(folder, out)


def test_what_a_killed_packer_leaves_is_cleared_before_it_goes_on(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "set", per_class=8), tmp_path / "out"
    out.mkdir()
    (out / ".pack.json.4711.part").write_bytes(b"{")  # killed before it had begun
    with full_disk(after=2):
        packed(folder, out)
    (out / ".train-000002.tar.4711.part").write_bytes(b"torn")
    left: list[list[Path]] = []
    pack_command(str(folder), Packing(out=out, say=lambda line: left.append([*out.glob("*.4711.part")])), vocabulary="")
    assert left
    assert not any(left)
    packed(folder, tmp_path / "whole")
    assert content_of(out) == content_of(tmp_path / "whole")


def test_progress_counts_what_this_process_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = make_folder(tmp_path / "set", per_class=8), tmp_path / "out"
    with full_disk(after=2):
        packed(folder, out)
    monkeypatch.setattr(pack, "time", SimpleNamespace(perf_counter=itertools.count().__next__))  # a second a look
    said: list[str] = []
    packed(folder, out, said)
    begun = len(json.loads((out / "index.json").read_text())["splits"]["train"]["shards"])
    assert said[0].startswith("train-000002.tar: ")
    done = int(said[0].split(": ")[1].split(" of ")[0])
    records = np.load(out / "train-records.npy")
    assert begun > 2
    assert done == int((records["shard"] <= 2).sum())
    assert said[0].endswith(f" {int((records['shard'] == 2).sum())}/s")


@pytest.mark.parametrize("flipped", [0, 3, 6], ids=["shard", "label", "checksum"])
def test_a_flip_in_what_is_known_of_a_finished_file_packs_it_again(tmp_path: Path, flipped: int) -> None:
    folder, out = make_folder(tmp_path / "set", per_class=8), tmp_path / "out"
    packed(folder, tmp_path / "whole")
    with full_disk(after=2):
        packed(folder, out)
    path = out / "train-000000.json"
    kept = json.loads(path.read_text())
    kept["records"][1][flipped] ^= 1
    path.write_text(json.dumps(kept))
    packed(folder, out)
    assert content_of(out) == content_of(tmp_path / "whole")


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["header", "label", "end"])
def test_verification_finds_flips_in_tar_files_that_no_image_is_part_of(tmp_path: Path, what: str) -> None:
    packed(make_folder(tmp_path / "set"), tmp_path / "out")
    assert describe(str(tmp_path / "out"), verify=True)["train"]["corrupt"] == []
    path = tmp_path / "out" / "train-000000.tar"
    record = open_data("packed", str(tmp_path / "out")).train.records[0]
    behind = int(record["offset"]) + -(-int(record["size"]) // 512) * 512
    flip(path, {"header": 3, "label": behind + 512, "end": -1}[what])
    facts = describe(str(tmp_path / "out"), verify=True)
    assert [row["file"] for row in facts["train"]["corrupt"]] == [str(path)]
    assert "does not have its checksum; pack it again" in facts["train"]["corrupt"][0]["reason"]
    assert not facts["test"]["corrupt"]


def test_verification_finds_flips_in_names_and_classes(tmp_path: Path) -> None:
    packed(make_folder(tmp_path / "set"), tmp_path / "out")
    names, index = tmp_path / "out" / "val-names.npy", tmp_path / "out" / "index.json"
    flip(names, -1)
    facts = describe(str(tmp_path / "out"), verify=True)
    assert [row["file"] for row in facts["test"]["corrupt"]] == [str(names)]
    flip(names, -1)
    index.write_text(index.read_text().replace('"bee"', '"bed"'))
    for split in ("train", "test"):  # this takes no reading of all
        found = describe(str(tmp_path / "out"))[split]["corrupt"]
        assert [row["file"] for row in found] == [str(index)]
        assert found[0]["reason"] == "it has the class 'bed' for 'bee/0.JPEG'; pack it again."


def test_half_a_pack_says_so(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "set", per_class=8), tmp_path / "out"
    with full_disk(after=2):
        packed(folder, out)
    with pytest.raises(DataError, match="out is packed only in part; run the same `bigstep data pack` again"):
        describe(str(out))


def test_a_damaged_image_says_how_to_find_the_others(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    (folder / "train" / "bee" / "1.JPEG").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        packed(folder, tmp_path / "out")
    path = folder / "train" / "bee" / "1.JPEG"
    expected = f"{path} cannot be decoded: cannot identify image file; `bigstep data {folder} --verify` names all"
    assert str(caught.value) == f"{expected} damaged images."  # nothing of where a buffer lies in memory


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    (folder / "train" / "ant" / "gone.JPEG").symlink_to(tmp_path / "nowhere.JPEG")
    with pytest.raises(DataError, match=r"ant/gone\.JPEG cannot be read: No such file"):
        packed(folder, tmp_path / "out")
    with pytest.raises(DataError, match=r"ant/gone\.JPEG cannot be read: No such file"):
        open_data("folder", str(folder)).fingerprint()


def test_a_readme_beside_images_makes_no_text_of_them(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    (folder / "README.md").write_text("photographs of insects")
    assert name_of_set(str(folder))[0] == "folder"
    assert packed(folder, tmp_path / "out")["images"] == 12
    (folder / "train" / "boxes.txt").write_text("0 0 64 64")  # beside the folders of classes
    assert name_of_set(str(folder))[0] == "folder"
    for part in ("train", "val"):
        (tmp_path / "books" / part / "plays").mkdir(parents=True)
        (tmp_path / "books" / part / "plays" / "hamlet.txt").write_text("to be or not to be")
    (tmp_path / "books" / "README.md").write_text("plays")
    assert name_of_set(str(tmp_path / "books"))[0] == "text"


def test_a_kind_of_data_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder is a kind of data, not a path"):
        pack_command("folder", Packing(out=tmp_path / "out"), vocabulary="bytes")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_the_name_of_a_kind_is_told_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["bigstep", "data", "pack", "photos", "packed"])
    with pytest.raises(SystemExit):
        main()
    assert "--data ./packed " in capsys.readouterr().out
    with pytest.raises(DataError, match="'packed' is a kind of data and also a path here; write ./packed"):
        name_of_set("packed")
    assert name_of_set("./packed") == ("packed", "packed")


def test_a_folder_that_was_mended_is_packed_by_the_same_command(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path / "set"), tmp_path / "out"
    damaged = min((folder / "train").rglob("*.JPEG"))  # before any file was complete
    content = damaged.read_bytes()
    damaged.write_bytes(content[:100])
    with pytest.raises(DataError, match="cannot be decoded"):
        packed(folder, out)
    damaged.write_bytes(content)
    assert packed(folder, out)["images"] == 12


def test_a_packer_is_heard_while_it_fills_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_GROUP", 2)
    heard: list[str] = []
    folder = make_folder(tmp_path / "set", per_class=4)
    pack.pack_folder(
        Wanted(name="folder", path=str(folder)),
        Packing(out=tmp_path / "out", say=lambda line: None, on_the_way=heard.append),
    )
    assert heard[0] == "train-000000.tar: 2 of 8 images"
    assert len(heard) > 2


def test_names_of_any_bytes_are_packed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No UTF-8, words that a terminal's markup knows, as long as a name may be, the same stem twice, hidden."""
    folder = make_folder(tmp_path / "set", classes=(os.fsdecode(b"caf\xe9"), "[red]ant"))
    for name in (os.fsdecode(b"\xff\xfe.jpg"), f"{'长' * 83}.jpg", "0.png", " spaced [x] .JPEG", ".hidden.jpg"):
        photograph(40, 30).save(folder / "train" / "[red]ant" / name)
    out = tmp_path / os.fsdecode(b"o\xfft")
    ends = []
    for words in (["pack", str(folder), str(out)], [str(out), "--verify"], [str(folder), "--sheet", "sheet.png"]):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["bigstep", "data", *words])
        with pytest.raises(SystemExit) as ending:
            main()
        ends.append(int(ending.value.code or 0))
    assert ends == [0, 0, 0]
    assert "[red]ant" in capsys.readouterr().out
    before, after = open_data("folder", str(folder)).train, open_data("packed", str(out)).train
    assert len(after) == 6 + 4
    assert after.classes == before.classes
    assert torch.equal(before.load_crops(list(range(10)), 16), after.load_crops(list(range(10)), 16))


def test_an_interrupted_packer_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = make_folder(tmp_path / "set"), tmp_path / "out"

    def interrupt(*how: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pack, "_encode", interrupt)
    monkeypatch.setattr("sys.argv", ["bigstep", "data", "pack", str(folder), str(out)])
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 130
    assert "interrupted; run the same command to continue." in capsys.readouterr().err
    assert list(content_of(out)) == ["pack.json"]
    monkeypatch.undo()
    assert packed(folder, out)["images"] == 12


def test_a_folder_of_somebody_else_gets_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_alone", lambda out: pytest.fail("it was locked"))
    with pytest.raises(ConfigError, match="not empty"):
        packed(make_folder(tmp_path / "set"), tmp_path / "set")
