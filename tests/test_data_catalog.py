"""Named sets: the cache, downloads from a local server, and what is said when they fail."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bigstep.data import catalog
from bigstep.data.catalog import open_data
from bigstep.data.cifar import PYTHON_FILES
from bigstep.data.download import Remote, download, unpack
from bigstep.errors import DataError
from test_data_files import write_cifar, write_idx_set


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address at which a local server publishes it."""
    folder = tmp_path / "published"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIGSTEP_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def checksum(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def tar_of(source: Path, target: Path, extra: list[tarfile.TarInfo] | None = None) -> None:
    with tarfile.open(target, "w:gz") as tar:
        for info in extra or []:
            tar.addfile(info, io.BytesIO(b"evil"[: info.size]))
        tar.add(source, "cifar-10-batches-py")


def publish_cifar(published: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    folder, address = published
    write_cifar(folder / "py", "python")
    tar_of(folder / "py", folder / "cifar-10-python.tar.gz", **options)
    remote = Remote(f"{address}/cifar-10-python.tar.gz", checksum(folder / "cifar-10-python.tar.gz"))
    monkeypatch.setattr(catalog, "CIFAR10", remote)


def test_a_missing_set_is_downloaded_once_with_progress(
    published: tuple[Path, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_cifar(published, monkeypatch)
    seen: list[tuple[str, int, int]] = []
    pair = open_data("cifar10", progress=lambda name, done, total: seen.append((name, done, total)))
    assert len(pair.train) == 30
    size = (published[0] / "cifar-10-python.tar.gz").stat().st_size
    assert seen[-1] == ("cifar-10-python.tar.gz", size, size)
    (published[0] / "cifar-10-python.tar.gz").unlink()
    assert len(open_data("cifar10").test) == 6  # from the cache
    assert not list(cache.rglob("*.part"))


def test_idx_files_are_downloaded(published: tuple[Path, str], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address = published
    write_idx_set(folder)
    names = [remote.name for remote in catalog.IDX_FILES["mnist"]]
    remotes = tuple(Remote(f"{address}/{name}", checksum(folder / name)) for name in names)
    monkeypatch.setitem(catalog.IDX_FILES, "mnist", remotes)
    assert len(open_data("mnist").train) == 20
    assert sorted(path.name for path in (cache / "mnist").glob("*.gz")) == sorted(names)


def test_a_checksum_may_be_of_what_a_file_unpacks_to(published: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = published
    content = bytes(range(256)) * 20_000  # some megabytes, so that it is unpacked piece by piece
    unpacked = "sha256-unpacked:" + hashlib.sha256(content).hexdigest()
    for level in (1, 9):  # packed in whatever way
        (folder / "file.gz").write_bytes(gzip.compress(content, level))
        assert download(Remote(f"{address}/file.gz", unpacked), tmp_path).exists()
    for damaged in (gzip.compress(content)[:-9], gzip.compress(content[:-1]), b"not gzip"):
        (folder / "file.gz").write_bytes(damaged)
        with pytest.raises(DataError, match="does not have the checksum sha256-unpacked"):
            download(Remote(f"{address}/file.gz", unpacked), tmp_path)


def test_every_named_file_is_fetched_safely_and_held_to_a_sha256() -> None:
    for remote in (catalog.CIFAR10, *(remote for files in catalog.IDX_FILES.values() for remote in files)):
        assert remote.url.startswith("https://")
        assert remote.checksum.startswith("sha256")


def test_the_lock_of_the_cache_is_never_written_through_a_link(cache: Path, tmp_path: Path) -> None:
    (cache / "cifar10").mkdir(parents=True)
    (tmp_path / "precious").write_text("do not touch")
    (cache / "cifar10" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(DataError, match="cache folder .* cannot be written"):
        open_data("cifar10")
    assert (tmp_path / "precious").read_text() == "do not touch"


def test_an_archive_that_a_person_put_there_is_unpacked(
    published: tuple[Path, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_cifar(published, monkeypatch)
    (cache / "cifar10").mkdir(parents=True)
    (published[0] / "cifar-10-python.tar.gz").rename(cache / "cifar10" / "cifar-10-python.tar.gz")
    assert len(open_data("cifar10").train) == 30


def test_only_expected_members_leave_an_archive(
    published: tuple[Path, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["../escaped", "/tmp/bigstep-escaped", "cifar-10-batches-py/extra", PYTHON_FILES[0]]
    extra = [tarfile.TarInfo(name) for name in names]
    for info in extra:
        info.size = 4
    extra[3].type, extra[3].linkname, extra[3].size = tarfile.SYMTYPE, "/etc/passwd", 0  # an expected name, as a link
    publish_cifar(published, monkeypatch, extra=extra)
    assert len(open_data("cifar10").train) == 30
    left = {str(path.relative_to(cache / "cifar10")) for path in (cache / "cifar10").rglob("*") if path.is_file()}
    assert left == {*PYTHON_FILES, ".lock", "cifar-10-python.tar.gz"}
    assert not (cache / "escaped").exists()
    assert not Path("/tmp/bigstep-escaped").exists()


def test_offline_one_sentence_says_what_to_put_where(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "CIFAR10", Remote("http://127.0.0.1:9/cifar-10-python.tar.gz", "sha256:0"))
    with pytest.raises(DataError) as caught:
        open_data("cifar10")
    sentence = str(caught.value)
    assert sentence.startswith(f"{cache / 'cifar10' / 'cifar-10-python.tar.gz'} is missing")
    assert "http://127.0.0.1:9/" in sentence
    assert "\n" not in sentence


def test_a_wrong_checksum_leaves_nothing_behind(published: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = published
    (folder / "file.gz").write_bytes(b"something else")
    for url in (f"{address}/file.gz", (folder / "file.gz").as_uri()):
        with pytest.raises(DataError, match="does not have the checksum sha256:1234"):
            download(Remote(url, "sha256:1234"), tmp_path)
    with pytest.raises(DataError, match=r"absent\.gz cannot be fetched \(File not found\)"):
        download(Remote(f"{address}/absent.gz", "sha256:1234"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"published"}


def test_a_damaged_or_incomplete_archive_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path / "py", "python")
    (tmp_path / "py" / "test_batch").unlink()
    archive = tmp_path / "a.tar.gz"
    tar_of(tmp_path / "py", archive)
    with pytest.raises(DataError, match=r"a\.tar\.gz holds no cifar-10-batches-py/test_batch"):
        unpack(archive, PYTHON_FILES, tmp_path / "out")
    archive.write_bytes(archive.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"a\.tar\.gz"):
        unpack(archive, PYTHON_FILES, tmp_path / "out")
    archive.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"a\.tar\.gz is damaged"):
        unpack(archive, PYTHON_FILES, tmp_path / "out")


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BIGSTEP_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cache folder .* cannot be written .*BIGSTEP_DATA"):
        open_data("cifar10")


def test_a_user_without_a_home_is_told_where_sets_can_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIGSTEP_DATA", raising=False)
    monkeypatch.setenv("HOME", "~")  # leads nowhere, as does that of a user who is not in the list of users
    with pytest.raises(DataError, match="no home folder to keep data sets in; set BIGSTEP_DATA"):
        open_data("cifar10")


def test_an_unknown_name_offers_its_nearest_neighbour() -> None:
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        open_data("cifar-10")
    with pytest.raises(DataError, match="does not hold CIFAR-10"):
        open_data("cifar10", "/nowhere/at/all")
