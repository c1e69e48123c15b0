"""Looking at a set: what `bigstep data` shows."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bigstep.cli import main
from bigstep.data.catalog import open_data
from bigstep.data.inspect import contact_sheet, describe
from bigstep.data.sources.folder import FolderImages, open_folder
from bigstep.described import usable_cores
from bigstep.errors import ConfigError, DataError
from test_data_files import cifar_arrays, write_cifar
from test_data_folder import make_folder


def test_a_set_in_memory_is_described_with_its_own_statistics(tmp_path: Path) -> None:
    write_cifar(tmp_path, "binary")
    facts = describe(str(tmp_path))
    pixels = cifar_arrays()[0].reshape(-1, 3, 1024) / 255
    assert facts["test"]["mean"] == pytest.approx(pixels.mean((0, 2)), abs=5e-5)  # four digits are kept
    assert facts["test"]["std"] == pytest.approx(pixels.std((0, 2)), abs=5e-5)
    assert facts["train"]["count"] == 30
    assert facts["train"]["per_class"]["airplane"] == 5
    assert facts["train"]["sizes"]["median"] == [32, 32]
    json.dumps(facts)


def test_a_folder_is_described(tmp_path: Path) -> None:
    facts = describe(str(make_folder(tmp_path)))
    assert facts["classes"] == ["ant", "bee"]
    assert facts["train"]["per_class"] == {"ant": 3, "bee": 3}
    assert facts["train"]["sizes"] == {"smallest": [64, 96], "median": [96, 64], "largest": [80, 80]}
    assert facts["train"]["corrupt"] == []
    assert all(0.2 < mean < 0.8 for mean in facts["train"]["mean"])
    json.dumps(facts)


def test_verification_names_every_damaged_file(tmp_path: Path) -> None:
    make_folder(tmp_path, per_class=4)
    damaged = [tmp_path / "train" / "ant" / "1.JPEG", tmp_path / "train" / "bee" / "3.JPEG"]
    damaged[0].write_bytes(damaged[0].read_bytes()[:-100])
    damaged[1].write_bytes(b"gone")
    facts = describe(str(tmp_path), verify=True)
    assert [row["file"] for row in facts["train"]["corrupt"]] == [str(path) for path in damaged]
    assert facts["train"]["checked"] == 8
    assert facts["test"]["corrupt"] == []


def test_a_corrupt_file_is_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path)
    ends = []
    for damage in (False, True):
        if damage:
            (tmp_path / "val" / "bee" / "0.JPEG").write_bytes(b"gone")
        for more in ([], ["--json"]):
            monkeypatch.setattr("sys.argv", ["bigstep", "data", str(tmp_path), "--verify", *more])
            with pytest.raises(SystemExit) as ending:
                main()
            ends.append(int(ending.value.code or 0))
    assert ends == [0, 0, 1, 1]
    told = capsys.readouterr().out
    assert "read: 6 of 6, none corrupt" in told, "a verification that found nothing says so"
    assert ", 1 corrupt" in told
    assert json.loads(told.splitlines()[-1])["test"]["corrupt"][0]["file"].endswith("bee/0.JPEG")


def test_contact_sheet_shows_classes_and_never_overwrites_unasked(tmp_path: Path) -> None:
    pair = open_data("folder", str(make_folder(tmp_path / "set")))
    (tmp_path / "set" / "train" / "bee" / "0.JPEG").write_bytes(b"gone")
    path = contact_sheet(pair, tmp_path / "sheet.png")
    with Image.open(path) as sheet:
        pixels = np.asarray(sheet)
    assert pixels.shape == (2 * 64, 150 + 10 * 64, 3)
    assert (pixels[:64, :150] < 128).any()  # a name is written
    assert (pixels[74, 160] == [255, 0, 0]).all()  # the damaged file is red
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        contact_sheet(pair, path)
    assert path.read_bytes() == before
    contact_sheet(open_data("embedded"), path, overwrite=True)
    assert path.read_bytes() != before
    with pytest.raises(ConfigError, match="cannot be written"):
        contact_sheet(pair, tmp_path / "absent" / "sheet.png")
    with pytest.raises(ConfigError, match="must be a .png file"):
        contact_sheet(pair, tmp_path / "sheet.txt")


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no 'nowhere' in /"):
        describe("/nowhere/at/all")
    with pytest.raises(DataError, match="is not a data set"):
        describe(str(tmp_path))
    make_folder(tmp_path)
    with pytest.raises(DataError, match=r"train holds the folders of the classes itself.*move or link them there"):
        describe(str(tmp_path / "train"))  # as torchvision's ImageFolder takes it


def test_verification_begins_with_few_images_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million files, what is kept for each that waits would fill gigabytes."""
    train, _ = open_folder(make_folder(tmp_path, per_class=600))
    train.path(0).write_bytes(b"damaged")
    begun, told = [], []
    submit = ThreadPoolExecutor.submit
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *given: (begun.append(1), submit(*given))[1])
    monkeypatch.setattr(FolderImages, "where", lambda self, index: (told.append(len(begun)), str(self.path(index)))[1])
    assert train.describe(verify=True)["checked"] == 1200
    assert len(told) == 1  # of the first image, which is damaged
    assert told[0] <= 8 * (usable_cores() + 4)
