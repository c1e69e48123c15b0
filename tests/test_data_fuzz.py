"""Mutated files: each opens and reads, or is one sentence; never a traceback, whatever byte is wrong."""

from __future__ import annotations

import gzip
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bigstep.data import open_data
from bigstep.data.command import pack_command
from bigstep.data.names import Packing
from bigstep.data.vocabulary import FILE, load_vocabulary, make_vocabulary
from bigstep.errors import BigstepError
from test_data_files import write_cifar, write_idx_set
from test_data_folder import make_folder

MUTATIONS = 40  # of each kind of file; more seeds are more cases
TEXT = b"to be, or not to be, that is the question. " * 40


def make_packed(folder: Path) -> None:
    pack_command(
        str(make_folder(folder / "set")), Packing(out=folder / "out", say=lambda line: None), vocabulary="bytes"
    )


def make_tokens(folder: Path) -> None:
    (folder / "a.txt").write_bytes(TEXT)
    pack_command(str(folder / "a.txt"), Packing(out=folder / "a.tokens"), vocabulary="words:300")


def make_numbers(folder: Path) -> None:
    np.save(folder / "a.npy", (np.arange(2000) % 300).astype(np.uint16))


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return make


# what makes the files -> (which of them is mutated, name and path of the set)
KINDS: dict[str, tuple[Callable[[Path], object], str, str, str]] = {
    "idx images": (lambda folder: write_idx_set(folder, packed=False), "train-images-idx3-ubyte", "mnist", "."),
    "idx labels": (lambda folder: write_idx_set(folder, packed=True), "t10k-labels-idx1-ubyte.gz", "mnist", "."),
    "cifar pickle": (lambda folder: write_cifar(folder, "python"), "data_batch_2", "cifar10", "."),
    "cifar binary": (lambda folder: write_cifar(folder, "binary"), "data_batch_2.bin", "cifar10", "."),
    "jpeg": (make_folder, "train/ant/0.JPEG", "folder", "."),
    "pack index": (make_packed, "out/index.json", "packed", "out"),
    "pack records": (make_packed, "out/train-records.npy", "packed", "out"),
    "pack names": (make_packed, "out/train-names.npy", "packed", "out"),
    "pack tar": (make_packed, "out/train-000000.tar", "packed", "out"),
    "tokens": (make_tokens, "a.tokens", "tokens", "a.tokens"),
    "npy": (make_numbers, "a.npy", "tokens", "a.npy"),
    "gzip text": (write("a.txt.gz", gzip.compress(TEXT)), "a.txt.gz", "text", "a.txt.gz"),
    "xz text": (write("a.txt.xz", lzma.compress(TEXT)), "a.txt.xz", "text", "a.txt.xz"),
}


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Flip, cut, insert, repeat or overwrite, near the beginning as often as anywhere."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(min(len(changed), chance.choice((16, 200, len(changed)))) or 1)
        match chance.choice(("flip", "cut", "insert", "repeat", "overwrite", "number")):
            case "flip" if changed:
                changed[place] ^= 1 << chance.randrange(8)
            case "cut":
                del changed[place : place + chance.choice((1, 4, 1000))]
            case "insert":
                changed[place:place] = chance.randbytes(chance.choice((1, 4, 100)))
            case "repeat":
                changed[place:place] = changed[place : place + 50]
            case "overwrite":
                changed[place : place + 4] = chance.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"9" * 4))
            case "number":
                changed = bytearray(bytes(changed).replace(b"1", chance.choice((b"-1", b"1e9", b"1" * 30, b"x")), 1))
    return bytes(changed)


def complaints(read: Callable[[], list[str]]) -> list[str]:
    """What is said of a file: by an error, or by a description."""
    try:
        return read()
    except BigstepError as error:
        return [str(error)]


def read_all(name: str, path: str) -> list[str]:
    pair = open_data(name, path, length=16)
    pair.fingerprint()
    said = []
    for source in (pair.train, pair.test):
        source.targets(torch.arange(len(source)))
        said += [row["reason"] for row in source.describe(True)["corrupt"]]
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_or_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    make, file, name, path = KINDS[kind]
    make(tmp_path)
    target = tmp_path / file
    good = target.read_bytes()
    assert read_all(name, str(tmp_path / path)) == []
    refused = 0
    for seed in range(MUTATIONS):
        target.write_bytes(mutate(good, random.Random(f"{kind} {seed}")))
        said = complaints(lambda: read_all(name, str(tmp_path / path)))
        assert all(sentence.isprintable() and len(sentence) < 600 for sentence in said)
        refused += bool(said)
    assert refused > MUTATIONS // 10


@pytest.mark.parametrize("vocabulary", ["chars", "words:300"])
def test_a_mutated_vocabulary_is_read_or_refused_in_one_sentence(vocabulary: str, tmp_path: Path) -> None:
    make_vocabulary(vocabulary, TEXT).keep(tmp_path)
    good = (tmp_path / FILE).read_bytes()

    def read() -> list[str]:
        kept = load_vocabulary(tmp_path)
        assert kept is not None
        kept.lengths()
        return []

    for seed in range(4 * MUTATIONS):
        (tmp_path / FILE).write_bytes(mutate(good, random.Random(seed)))
        assert all(sentence.isprintable() and len(sentence) < 600 for sentence in complaints(read))
