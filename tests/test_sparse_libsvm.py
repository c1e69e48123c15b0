"""LIBSVM files: the same numbers as scikit-learn reads, errors that name the line, and training from a file."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bigstep.errors import DataError
from bigstep.sparse import Sparsity, measure_sparsity, read_libsvm, read_libsvm_files, train_sparse
from bigstep.sparse.rows import as_rows, survey
from bigstep.sparse.threads import Threads


def test_numbers_are_those_that_python_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = [f"{x:.{d}{k}}" for x in rng.normal(size=50) for d, k in ((3, "f"), (9, "e"), (17, "g"))]
    numbers += ["0", "-0.0", "1", "+2.5", ".5", "3.", "1e10", "1E-10", "1e-45", "123456789012345678901234567890"]
    numbers += ["0.00000000000000000000000000012345678901234567890", "3.4e38", "1e-300"]
    path = tmp_path / "numbers.svm"
    path.write_text("1 " + " ".join(f"{i + 1}:{x}" for i, x in enumerate(numbers)) + "\n")
    rows, _ = read_libsvm(path)
    # our parser may be off by one unit of float64, which can round to the neighbouring float32
    np.testing.assert_array_max_ulp(rows.values, np.array(numbers, dtype=np.float64).astype(np.float32), maxulp=1)
    assert rows.indices.tolist() == list(range(len(numbers)))


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
@pytest.mark.parametrize("packed", [False, True])
def test_comments_blank_lines_endings_and_gzip(tmp_path: Path, ending: str, packed: bool) -> None:
    text = ("# header\n\n+1 1:0.5\t3:2 # tail 4:4\n-1\n2.0  2:1" + ending).encode()
    path = tmp_path / "file.svm"
    path.write_bytes(gzip.compress(text) if packed else text)
    rows, labels = read_libsvm(path)
    assert labels.tolist() == [1, -1, 2]
    assert rows.indptr.tolist() == [0, 2, 2, 3]
    assert rows.indices.tolist() == [0, 2, 1]
    assert rows.values.tolist() == [0.5, 2, 1]


def test_a_file_that_uses_index_zero_counts_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "zero.svm"
    path.write_text("1 0:1 2:1\n0 1:1\n")
    assert read_libsvm(path)[0].indices.tolist() == [0, 2, 1]


def test_files_that_belong_together_count_from_the_same_number(tmp_path: Path) -> None:
    (tmp_path / "train.svm").write_text("1 0:1 2:1\n0 1:1 3:1\n" * 20)
    (tmp_path / "test.svm").write_text("1 2:1\n0 1:1\n0 3:1\n")  # no example has feature 0
    for train, test in (("train.svm", "test.svm"), ("test.svm", "train.svm")):
        (rows, _), (others, _) = read_libsvm_files([tmp_path / train, tmp_path / test])
        assert {*rows.indices.tolist(), *others.indices.tolist()} == {0, 1, 2, 3}
        assert rows.n_features == others.n_features == 4
    assert train_sparse(tmp_path / "train.svm", test=tmp_path / "test.svm")["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 1:0.5 7", "truncated"),
        ("1 1:0.5 7:", "truncated"),
        ("1 1:0.5 7:-", "truncated"),
        ("1 1:0.5 7:1e", "truncated"),
        ("1 1:0.5x", "truncated"),
        ("1.5 1:0.5", "label is not an integer"),
        ("cat 1:0.5", "label is not an integer"),
        ("1,2 1:0.5", "label is not an integer"),
        ("nan 1:0.5", "label is not an integer"),
        ("1 2:1 1:1", "unsorted or duplicate"),
        ("1 2:1 2:1", "unsorted or duplicate"),
        ("1 2:nan", "NaN"),
        ("1 2:-inf", "NaN"),
        ("1 2:1e39", "too large"),
        ("1 -2:1", "feature index"),
        ("1 qid:3 2:1", "feature index"),
        ("1 99999999999:1", "feature index"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.svm"
    path.write_text(f"1 1:1\n# fine\n{line}\n0 1:1\n")
    with pytest.raises(DataError, match=f"bad.svm, line 3: .*{message}"):
        read_libsvm(path)


def test_files_that_are_empty_missing_or_damaged_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.svm").write_text("\n# nothing\n")
    with pytest.raises(DataError, match="holds no examples"):
        read_libsvm(tmp_path / "empty.svm")
    (tmp_path / "none.svm").write_bytes(b"")
    with pytest.raises(DataError, match="holds no examples"):
        read_libsvm(tmp_path / "none.svm")
    with pytest.raises(DataError, match="cannot be read"):
        read_libsvm(tmp_path / "absent.svm")
    (tmp_path / "cut.svm.gz").write_bytes(gzip.compress(b"1 1:1\n" * 1000)[:-12])
    with pytest.raises(DataError, match="truncated gzip"):
        read_libsvm(tmp_path / "cut.svm.gz")


def test_lines_that_cross_the_blocks_of_reading_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{i % 2} " + " ".join(f"{j + 1}:{i}.{j}" for j in range(i % 7)) for i in range(200)]
    for name, pack in (("a.svm", bytes), ("a.svm.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack("\n\n".join(lines).encode()))
    whole, labels = read_libsvm(tmp_path / "a.svm")
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr("bigstep.sparse.libsvm._BLOCK", size)
        for name in ("a.svm", "a.svm.gz"):
            rows, again = read_libsvm(tmp_path / name)
            np.testing.assert_array_equal(again, labels)
            for field in ("values", "indices", "indptr"):
                np.testing.assert_array_equal(getattr(rows, field), getattr(whole, field))
    (tmp_path / "b.svm").write_text("1 1:1\n" * 300 + "\n\n0 x\n")
    with pytest.raises(DataError, match="line 303"):
        read_libsvm(tmp_path / "b.svm")


@pytest.mark.parametrize("line", [b"\n", b"1\n", b"1 1:1\n", b" "], ids=["nothing", "label", "row", "no end"])
def test_a_small_packed_file_takes_little_memory(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bomb.svm.gz"
    path.write_bytes(gzip.compress(line * (40_000_000 // len(line)), 1))
    assert path.stat().st_size < 400_000
    program = f"""
import resource
from bigstep.errors import DataError
from bigstep.sparse import read_libsvm
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_libsvm({str(path)!r})
except DataError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    sentence, megabytes = result.stdout.splitlines()
    assert "more than 32 times its size" in sentence
    # 20 MB of text at most, and a label and a row's start are 16 bytes where the text has 2; as text and arrays of the
    # whole it was up to 0.5 GB
    assert int(megabytes) < 250


def test_an_index_far_beyond_what_a_file_fills_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "wide.svm"
    path.write_text("1 2000000000:1\n0 1:1\n")
    with pytest.raises(DataError, match="index of 2,000,000,000 but only 2 values"):
        read_libsvm(path)
    assert read_libsvm(path, n_features=2_000_000_000)[0].n_features == 2_000_000_000


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.svm")
    with pytest.raises(DataError, match="not a regular file"):
        read_libsvm(tmp_path / "pipe.svm")


def test_training_from_files_gives_the_facts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, n in (("train", 400), ("test", 100)):
        lines = []
        for _ in range(n):
            label = rng.integers(2)
            common, own = rng.integers(1, 40), 50 + label * 20 + rng.integers(20)
            lines.append(f"{2 * label - 1} {common}:1 {own}:1")
        (tmp_path / name).write_text("\n".join(lines))
    epochs: list[int] = []
    facts = train_sparse(
        tmp_path / "train",
        test=tmp_path / "test",
        loss="logistic",
        mode="serial",
        epochs=5,
        progress=lambda row: epochs.append(row["epoch"]),
    )
    assert epochs == [1, 2, 3, 4, 5]
    assert facts["accuracy"] == 1.0
    assert facts["classes"] == [-1, 1]
    assert (facts["examples"], facts["test_examples"], facts["nonzeros"]) == (400, 100, 800)
    assert facts["report"]["sparsity"]["omega"] == 2
    (tmp_path / "one").write_text("1 1:1\n1 2:1\n")
    with pytest.raises(DataError, match="1 class only"):
        train_sparse(tmp_path / "one")


def test_sparsity_equals_the_definitions() -> None:
    rng = np.random.default_rng(2)
    dense = (rng.random((200, 50)) < 0.03).astype(np.float32)
    dense[:, 0] = rng.random(200) < 0.2
    rows = as_rows(dense)
    with Threads(1) as threads:
        figures = measure_sparsity(rows, survey(rows, threads))
    meets = (dense @ dense.T) > 0
    assert figures.omega == (dense != 0).sum(axis=1).max()
    assert figures.delta == (dense != 0).mean(axis=0).max()
    assert figures.rho == meets.mean(axis=1).max()


def test_prediction_follows_the_figures() -> None:
    cut = Sparsity(omega=2, delta=1e-7, rho=1e-7, density=1e-7)
    assert "near-linear speed-up is promised" in cut.prediction(8)
    assert cut.slowdown(8) == pytest.approx(1 + 6 * 1e-7 * 8 + 4 * 64 * 2 * np.sqrt(1e-7))
    rcv1 = Sparsity(omega=1000, delta=1.0, rho=0.44, density=0.0016)
    assert "does not promise it" in rcv1.prediction(8)
    dense = Sparsity(omega=50, delta=1.0, rho=1.0, density=1.0)
    assert "not predicted to work" in dense.prediction(2)
    assert "cannot collide" in dense.prediction(1)
