"""Sparse runs from the command line: recorded, reported, and kept in a file that loads and runs no code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigstep.cli.train import Train, train
from bigstep.errors import BigstepError, ConfigError, DataError
from bigstep.records import read_run
from bigstep.report.outcome import outcome_of
from bigstep.sparse import HogwildClassifier, HogwildFactorizer, load, read_libsvm, save


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two LIBSVM files, and one whose examples are all of one class, to work in."""
    rng = np.random.default_rng(0)
    for name, n in (("train.svm", 400), ("test.svm", 100)):
        labels = rng.integers(0, 2, n)
        rows = [f"{2 * y - 1} {rng.integers(1, 40)}:1 {50 + y * 20 + rng.integers(20)}:1" for y in labels]
        (tmp_path / name).write_text("\n".join(rows) + "\n")
    (tmp_path / "one.svm").write_text("1 1:1\n1 2:1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sparse_run(data: str = "train.svm", **options: Any) -> None:
    train(Train(recipe="hogwild", data=data, report=False, **options))


def test_a_run_keeps_its_record_and_an_estimator_that_predicts_the_same(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse_run(epochs=4.0, out=files / "run", settings=["test=test.svm", "mode=racing"], seed=3, name="mine")
    run = read_run(files / "run")
    assert run.facts["name"] == "mine"
    assert [row["epoch"] for row in run.train] == [1, 2, 3, 4]
    assert (run.config["seed"], run.config["sparse"]["mode"]) == (3, "racing")
    shown = outcome_of(run)
    assert (shown.status, shown.data, shown.accuracy) == ("finished", "train.svm", run.result["accuracy"])
    model = load(files / "run")
    assert isinstance(model, HogwildClassifier)
    rows, labels = read_libsvm(files / "test.svm", n_features=model.n_features_in_)
    assert model.score(rows, labels) == run.result["accuracy"] > 0.9
    assert model.mean_loss(rows, labels) == pytest.approx(run.evaluations[-1]["eval_loss"])
    assert str(files / "run" / "model.safetensors") in capsys.readouterr().out


def test_without_out_each_run_gets_a_folder_of_its_own(files: Path) -> None:
    for _ in range(2):
        sparse_run(epochs=1.0)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["hogwild-sparse", "hogwild-sparse-2"]


@pytest.mark.parametrize("width", [80, 50])
def test_what_is_printed_fits_the_terminal(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    sparse_run(epochs=1.0, out=Path("run"), settings=["n_threads=1", "test=test.svm"])
    lines = capsys.readouterr().out.splitlines()
    assert any("cannot collide" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert max(len(line) for line in lines if "Omega" in line or "collide" in line) <= width


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": float("nan")}, "--epochs is nan"),
        ({"epochs": float("inf")}, "--epochs is inf"),
        ({"epochs": 1e30}, "--epochs is 1e"),
        ({"epochs": 2.5}, "whole epochs"),
        ({"procs": 2}, "n_threads=2"),
        ({"tensorboard": True}, "metrics.jsonl"),
        ({"resume": True}, "start a new run"),
        ({"settings": ["mode=cashed"]}, "did you mean 'cached'"),
        ({"settings": ["alpha=nan"]}, "alpha takes a number"),
        ({"settings": ["alpha=-1"]}, "alpha=-1"),
        ({"settings": ["n_threads=2.5"]}, r"n_threads takes a whole number \(got 2.5\)"),
        ({"settings": ["loss"]}, r"--set takes FIELD=VALUE, .* \(got 'loss'\)"),
        ({"settings": ["x" * 5000]}, "--set takes FIELD=VALUE"),
        ({"settings": ["loss=[" + "x" * 5000]}, "not valid YAML"),
        ({"settings": ["n_threads=10000"]}, "more than the .* cores"),
        ({"seed": -1}, "random_state=-1"),
        ({"data": "one.svm"}, "1 class only"),
        ({"settings": ["x" * 5000 + "=1"]}, "has no field 'xxx"),
        ({"settings": ["loss=" + "x" * 5000]}, "loss='xxx"),
        ({"settings": ["test=" + "x" * 5000]}, "too long"),
        ({"out": Path("train.svm")}, "is a file"),
    ],
)
def test_a_mistake_is_one_short_sentence_and_leaves_nothing(files: Path, options: Any, message: str) -> None:
    before = sorted(files.iterdir())
    with pytest.raises(BigstepError, match=message) as error:
        sparse_run(**options)
    assert len(str(error.value)) < 400
    assert sorted(files.iterdir()) == before


def test_a_name_of_5000_characters_is_one_short_sentence(files: Path) -> None:
    with pytest.raises(DataError, match="cannot be read") as error:
        train(Train(recipe="hogwild", data="x" * 5000 + ".svm", report=False))
    assert len(str(error.value)) < 400


def test_epochs_without_number_or_end_are_refused_in_python_too() -> None:
    for epochs in (10**30, 0, 2.0, float("inf"), "3"):
        with pytest.raises(ConfigError, match="epochs="):
            HogwildClassifier(epochs=epochs).fit(np.eye(2), [0, 1])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="epochs="):
            HogwildFactorizer(epochs=epochs).fit([(0, 0), (1, 1)], [0.0, 1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [[0, 1], [-1, 1], ["cat", "dog"], [True, False], ["a", "b", "ccc"]])
def test_a_classifier_is_the_same_after_a_file_and_learns_on_from_it(tmp_path: Path, labels: list[Any]) -> None:
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(60, 5)), np.array(labels)[rng.integers(0, len(labels), 60)]
    model = HogwildClassifier(mode="serial", loss="logistic", epochs=3).fit(X, y)
    save(model, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors")
    assert isinstance(again, HogwildClassifier)
    assert again.classes_.dtype == model.classes_.dtype
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.fit_report_ == model.fit_report_
    np.testing.assert_array_equal(again.partial_fit(X, y).coef_, model.partial_fit(X, y).coef_)


def test_a_factorizer_is_the_same_after_a_file(tmp_path: Path) -> None:
    pairs = np.stack(np.divmod(np.arange(200), 20), axis=1)
    model = HogwildFactorizer(rank=2, epochs=2, mode="serial").fit(pairs, np.sin(np.arange(200.0)))
    save(model, tmp_path / "factors.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "factors.safetensors").predict(pairs), model.predict(pairs))


def test_a_file_that_is_damaged_or_foreign_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(HogwildClassifier(mode="serial", epochs=1).fit(np.eye(3), [0, 1, 2]), path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    for trial in range(300):
        damaged = bytearray(whole)
        if trial % 3 == 0:
            damaged = damaged[: rng.integers(len(whole))]
        else:  # in the header, where every byte means something
            for place in rng.integers(0, 8 + length, 1 + trial % 4):
                damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            loaded = load(path)
        except (DataError, ConfigError) as error:
            assert len(str(error)) < 600  # noqa: PT017 - one sentence, whichever it is
        else:
            assert loaded.predict(np.eye(3)).shape == (3,)  # a letter in a sentence was hit, say


def test_a_file_that_names_another_class_runs_nothing(tmp_path: Path) -> None:
    from safetensors.numpy import save as write_arrays

    header = {"format": 1, "estimator": "os.system", "params": {"command": "touch here"}, "values": {}, "report": {}}
    path = tmp_path / "model.safetensors"
    path.write_bytes(write_arrays({"coef_": np.zeros((1, 2), np.float32)}, {"bigstep.sparse": json.dumps(header)}))
    with pytest.raises(DataError, match="lacks something that a sparse estimator"):
        load(path)
