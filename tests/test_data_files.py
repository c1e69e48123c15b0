"""Files that hold whole sets: read right when they are right, refused with their name when they are not."""

from __future__ import annotations

import gzip
import pickle
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigstep.data import embedded
from bigstep.data.catalog import open_data
from bigstep.data.cifar import find_cifar, open_cifar, read_batch
from bigstep.data.embedded import open_embedded
from bigstep.data.idx import find_idx, read_idx
from bigstep.data.inspect import describe
from bigstep.data.pair import hold_out
from bigstep.data.sources.memory import TensorImages
from bigstep.errors import DataError


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_idx_set(folder: Path, images: int = 20, labels: int = 20, packed: bool = True) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for split in ("train", "t10k"):
        content = {
            f"{split}-images-idx3-ubyte": idx_bytes(rng.integers(0, 256, (images, 28, 28), dtype=np.uint8)),
            f"{split}-labels-idx1-ubyte": idx_bytes((np.arange(labels) % 10).astype(np.uint8)),
        }
        for name, data in content.items():
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)


def cifar_arrays(count: int = 6) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), [n % 10 for n in range(count)]


def write_cifar(folder: Path, form: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = cifar_arrays()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        if form == "binary":
            records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            # protocol 2 with bytes as keys, as the official files have it
            batch = {b"batch_label": b"one", b"labels": labels, b"data": pixels, b"filenames": [b"a.png"] * 6}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


def test_embedded_set_is_balanced_and_has_the_statistics_that_it_claims() -> None:
    train, test = open_embedded()
    assert train.labels.bincount().tolist() == [1200] * 10
    assert test.labels.bincount().tolist() == [200] * 10
    assert train.labels[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]  # the original's order
    facts = describe("embedded")["train"]
    assert tuple(facts["mean"]) == train.mean
    assert tuple(facts["std"]) == train.std
    assert sum(file.stat().st_size for file in embedded.FOLDER.iterdir()) <= 8_000_000
    assert "Zalando SE" in (embedded.FOLDER / "LICENSE.txt").read_text()


def test_embedded_set_opens_quickly() -> None:
    def seconds() -> float:
        embedded._decoded.cache_clear()
        start = time.process_time()  # of this process: the machine may be busy
        open_data("embedded")
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.6


def test_each_caller_may_change_its_embedded_images() -> None:
    first, _ = embedded.open_embedded()
    first.images.zero_()
    first.labels.zero_()
    again, _ = embedded.open_embedded()
    assert again.images.any()
    assert again.labels.any()


def test_an_altered_embedded_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray((embedded.FOLDER / "train.png").read_bytes())
    content[1000] ^= 1
    (tmp_path / "train.png").write_bytes(content)
    monkeypatch.setattr(embedded, "FOLDER", tmp_path)
    with pytest.raises(DataError, match=r"train\.png is not the file that ships"):
        open_embedded()


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_plain_and_packed(tmp_path: Path, packed: bool) -> None:
    write_idx_set(tmp_path / "set", packed=packed)
    pair = open_data("mnist", str(tmp_path / "set"))
    expected = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    assert np.array_equal(pair.train.images[:, 0].numpy(), expected)
    assert pair.test.labels.tolist() == [n % 10 for n in range(20)]
    assert pair.train.classes == tuple("0123456789")


BAD_IDX = {
    "claims more than it holds": (idx_bytes(np.zeros(5, np.uint8))[:-1], "only 4"),
    "holds more than it claims": (idx_bytes(np.zeros(5, np.uint8)) + b"x", "holds more"),
    "claims a huge count": (bytes([0, 0, 8, 1]) + b"\xff" * 4 + b"abc", "4294967295 values"),
    "is of another type": (bytes([0, 0, 13, 1]) + b"\0" * 8, "not an IDX file"),
    "is empty": (b"", "not an IDX file"),
    "holds nothing": (bytes([0, 0, 8, 1, 0, 0, 0, 0]), "holds no values"),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", BAD_IDX)
def test_a_bad_idx_file_is_named(tmp_path: Path, case: str, packed: bool) -> None:
    content, sentence = BAD_IDX[case]
    path = tmp_path / ("labels.gz" if packed else "labels")
    path.write_bytes(gzip.compress(content) if packed else content)
    if case == "claims more than it holds" and not packed:
        sentence = "cannot hold"  # seen from the size of the file, before it is read
    with pytest.raises(DataError, match=sentence) as caught:
        read_idx(path, 1)
    assert str(path) in str(caught.value)


def test_a_torn_gzip_file_is_named(tmp_path: Path) -> None:
    write_idx_set(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="train-images-idx3-ubyte.gz cannot be read: its compressed data is damaged"):
        open_data("fashion-mnist", str(tmp_path))
    path.write_bytes(b"not gzip at all")
    with pytest.raises(DataError, match="train-images-idx3-ubyte.gz cannot be read"):
        open_data("fashion-mnist", str(tmp_path))


def test_a_wrong_number_of_labels_names_the_file(tmp_path: Path) -> None:
    write_idx_set(tmp_path, images=20, labels=19)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz has 19 labels for the 20 images"):
        open_data("mnist", str(tmp_path))


def test_a_missing_idx_file_is_noticed(tmp_path: Path) -> None:
    write_idx_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    assert find_idx(tmp_path) is None
    with pytest.raises(DataError, match="does not hold the files of mnist"):
        open_data("mnist", str(tmp_path))


@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize("nested", [True, False])
def test_cifar_in_both_official_forms(tmp_path: Path, form: str, nested: bool) -> None:
    folder = tmp_path / ("cifar-10-batches-py" if form == "python" else "cifar-10-batches-bin") if nested else tmp_path
    write_cifar(folder, form)
    pixels, labels = cifar_arrays()
    pair = open_data("cifar10", str(tmp_path))
    assert len(pair.train) == 30
    assert np.array_equal(pair.test.images.numpy(), pixels.reshape(-1, 3, 32, 32))
    assert pair.test.labels.tolist() == labels
    assert pair.train.classes[3] == "cat"


class Evil:
    """Runs a command when an ordinary unpickler loads it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    write_cifar(tmp_path, "python")
    ran = tmp_path / "ran"
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": Evil(ran), b"labels": [1]}))
    files = find_cifar(tmp_path)
    assert files is not None
    with pytest.raises(DataError, match=r"data_batch_3 is not a batch of CIFAR-10: it asks for pathlib\.\w+"):
        open_cifar(files)
    assert not ran.exists()
    pickle.loads((tmp_path / "data_batch_3").read_bytes())  # an ordinary load does run it
    assert ran.exists()


BAD_PICKLES = {
    "objects instead of bytes": pickle.dumps({b"data": np.array([object()]), b"labels": [1]}),
    "numbers instead of bytes": pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}),
    "another shape": pickle.dumps({b"data": np.zeros((1, 3000), np.uint8), b"labels": [1]}),
    "no labels": pickle.dumps({b"data": np.zeros((1, 3072), np.uint8)}),
    "too few labels": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}),
    "a label of no class": pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}),
    "labels that are no numbers": pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["1"]}),
    "no dict": pickle.dumps([1, 2]),
    "torn": pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1]})[:-100],
    "no pickle": b"\x89PNG nonsense",
    "empty": b"",
}


@pytest.mark.parametrize("case", BAD_PICKLES)
def test_a_bad_pickle_is_named(tmp_path: Path, case: str) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(BAD_PICKLES[case])
    with pytest.raises(DataError) as caught:
        read_batch(path)
    assert str(path) in str(caught.value)


SMALL_FILES_THAT_ASK_FOR_MUCH = {
    # a part of a pickle numbered 4,294,967,295: Python's C reader makes a table as long
    "cifar memo": ("data_batch_1", b"\x80\x02]r\xff\xff\xff\xff."),
    "cifar bytearray": ("data_batch_1", b"\x80\x05\x96" + struct.pack("<Q", 2**35) + b"x."),
    "cifar lists": ("data_batch_1", b"\x80\x02" + b"]" * 4_000_000),
    "idx zeros": (
        "train-images-idx3-ubyte.gz",
        gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 800_000, 28, 28)) + gzip.compress(bytes(2**27)) * 5,
    ),
}


READ_EACH = """
import os, resource, sys
from pathlib import Path
from bigstep.data.cifar import read_batch
from bigstep.data.idx import read_idx
from bigstep.errors import DataError
for name in sys.argv[1:]:
    if os.fork():  # each has a memory of its own
        os.wait()
        continue
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_idx(Path(name), 3) if name.endswith(".gz") else read_batch(Path(name))
    except DataError as error:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error, flush=True)
    os._exit(0)
"""


def test_a_small_file_never_takes_much_memory(tmp_path: Path) -> None:
    paths = []
    for case, (name, content) in SMALL_FILES_THAT_ASK_FOR_MUCH.items():
        paths.append(tmp_path / case.replace(" ", "-") / name)
        paths[-1].parent.mkdir()
        paths[-1].write_bytes(content)
    command = [sys.executable, "-c", READ_EACH, *map(str, paths)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for path, line in zip(paths, told, strict=True):
        grown, _, sentence = line.partition(" ")
        assert str(path) in sentence
        assert int(grown) < 200_000, path  # kB: what half a million Python objects take, and some


def test_bad_binary_batches_are_named(tmp_path: Path) -> None:
    path = tmp_path / "test_batch.bin"
    path.write_bytes(bytes(3073 * 2 - 1))
    with pytest.raises(DataError, match=r"test_batch\.bin has 6,145 bytes, which is not a multiple of 3,073"):
        read_batch(path)
    path.write_bytes(bytes([77]) + bytes(3072))
    with pytest.raises(DataError, match=r"test_batch\.bin has a label 77"):
        read_batch(path)


def test_holding_out_is_balanced_disjoint_and_decided_by_the_seed() -> None:
    labels = torch.arange(100) % 4
    images = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1)
    full = TensorImages(images=images, labels=labels, classes=tuple("abcd"), mean=(0.0,), std=(1.0,), name="tiny")
    first, again, other = hold_out(full, 0.2, 1), hold_out(full, 0.2, 1), hold_out(full, 0.2, 2)
    assert first.test.labels.bincount().tolist() == [5] * 4
    together = torch.cat([first.train.images, first.test.images]).flatten()
    assert sorted(together.tolist()) == list(range(100))
    assert torch.equal(first.test.images, again.test.images)
    assert not torch.equal(first.test.images, other.test.images)


def test_tensor_images_refuse_what_cannot_be_a_set() -> None:
    good: dict[str, Any] = {"classes": ("a", "b"), "mean": (0.0,), "std": (1.0,), "name": "mine"}
    images, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    for change, sentence in [
        ({"images": images.float()}, "must be uint8"),
        ({"images": images[0]}, "must be uint8 of shape"),
        ({"labels": labels[:1]}, "1 labels for 2 images"),
        ({"labels": labels + 1}, "label 2"),
        ({"labels": labels - 1}, "label -1"),
        ({"mean": (0.0, 0.0)}, "1 channels need"),
        ({"images": images[:0], "labels": labels[:0]}, "holds no images"),
    ]:
        with pytest.raises(DataError, match=f"mine.*{sentence}"):
            TensorImages(**{"images": images, "labels": labels, **good, **change})
