"""Files that somebody damaged or forged: read or refused with one sentence, nothing run, nothing outside touched."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bigstep.config.text import config_from_yaml
from bigstep.data.download import unpack
from bigstep.engine.checkpoint import load_checkpoint, save_checkpoint
from bigstep.errors import ConfigError, DataError
from bigstep.records import locked, write_atomically
from warm import run_script
from worlds import World

MUTATIONS = Path(__file__).parent.parent / "benchmarks" / "faults" / "mutations.py"


@pytest.mark.timeout(400)
def test_sixty_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    run_script(MUTATIONS, "--cases", "63", "--seed", "1", "--out", str(tmp_path))  # it fails where a case does
    cases = json.loads((tmp_path / "mutations.json").read_text())["cases"]
    assert len(cases) == 63
    assert {0, 2} <= {case["status"] for case in cases} <= {0, 1, 2}, "the mutations do not reach both ends"


def sealed(path: Path, payload: bytes) -> Path:
    path.write_bytes(b"bigstep1" + hashlib.sha256(payload).digest() + payload)
    return path


def test_a_checkpoint_that_would_unpack_to_more_than_it_is_is_refused(tmp_path: Path) -> None:
    honest = save_checkpoint(tmp_path, 1, {"x": torch.zeros(100_000)}, keep=1)
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(honest.read_bytes()[40:])) as plain, zipfile.ZipFile(packed, "w") as bomb:
        for member in plain.infolist():
            bomb.writestr(member.filename, plain.read(member), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match="claim to be larger than the file"):
        load_checkpoint(sealed(tmp_path / "bomb.ckpt", packed.getvalue()))


def refusal_with_little_memory(path: Path, room_bytes: int) -> str:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + room_bytes, before[1]))
    try:
        with pytest.raises(MemoryError):
            bytearray(path.stat().st_size)
        with pytest.raises(DataError) as refusal:
            load_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return str(refusal.value)


def test_a_checkpoint_as_large_as_the_disk_takes_no_memory(world: Callable[[int], World], tmp_path: Path) -> None:
    path = tmp_path / "step-000000001.ckpt"
    with open(path, "wb") as file:
        file.write(b"bigstep1" + bytes(32))
        file.truncate(2**30)  # a hole: nothing is written
    (said,) = world(1).run(refusal_with_little_memory, path, 2**28)
    assert "its checksum does not match" in said


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB + "epochs: *k\n", "line 2 is not valid YAML: aliases"),
        ("epochs: !!python/object/apply:os.system ['touch owned']\n", "is not valid YAML"),
        ("[" * 100_000, "is not valid YAML"),
        ("epochs: " + "9" * 5000 + "\n", "is not valid YAML"),
        ("workers: {count: 2, local_batch: 2}\nlr: {base: 0.1}\nepochs: " + "9" * 400 + "\n", "epochs takes a number"),
    ],
    ids=["aliases", "code", "depth", "digits", "overflow"],
)
def test_hostile_yaml_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config_from_yaml(text, "run.yaml")
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_an_archive_writes_only_what_was_asked_for_inside_its_folder(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    archive = tmp_path / "set.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:

        def add(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = (len(content) if not link else 0), kind, link
            tar.addfile(member, io.BytesIO(content) if not link else None)

        add("../outside/escaped")
        add(str(outside / "absolute"))
        add("batches", kind=tarfile.SYMTYPE, link=str(outside))  # a folder that is a link to the outside
        add("wanted", kind=tarfile.SYMTYPE, link="/etc/hostname")
        add("batches/one", b"good")
        add("unwanted")
    unpack(archive, ("batches/one",), inside)
    assert (inside / "batches" / "one").read_bytes() == b"good"
    assert [str(path.relative_to(inside)) for path in sorted(inside.rglob("*"))] == ["batches", "batches/one"]
    assert list(outside.iterdir()) == []
    with pytest.raises(DataError, match="holds no wanted"):
        unpack(archive, ("wanted",), inside)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    folder.mkdir()
    (folder / "run.json").symlink_to(victim)
    (folder / f".run.json.{os.getpid()}.part").symlink_to(victim)
    write_atomically(folder / "run.json", b"new")
    assert victim.read_text() == "mine"
    assert (folder / "run.json").read_bytes() == b"new"
    assert not (folder / "run.json").is_symlink()


def test_what_a_killed_writer_left_is_swept_by_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    left = [tmp_path / ".run.json.99.part", tmp_path / "checkpoints" / ".step-000000004.ckpt.99.part"]
    kept = [tmp_path / "notes.part", tmp_path / "checkpoints" / "step-000000002.ckpt"]
    for path in (*left, *kept):
        path.write_bytes(b"half")
    with locked(tmp_path):
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in kept)
