"""What was compiled is kept by versions and device, and the next run is told how long it will take."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bigstep.config.text import apply_settings
from bigstep.engine.compiled import KEPT, VARIABLES, Preparation, keep_compiled, prepares, shape_of
from bigstep.engine.meter import Flush
from bigstep.recipes import load

FACTS = {"torch": "2.13", "triton": "3.7", "cuda": "12.9", "cudnn": "91002", "device": "H200", "bigstep": "0.2.0"}


@pytest.fixture(autouse=True)
def no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "x")  # so that what a test sets is undone
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("changed", FACTS)
def test_another_version_or_device_has_a_folder_of_its_own(changed: str, tmp_path: Path) -> None:
    one = keep_compiled(FACTS, tmp_path)
    assert keep_compiled(dict(reversed(FACTS.items())), tmp_path) == one
    assert keep_compiled({**FACTS, changed: "other"}, tmp_path) != one


def test_compilers_are_given_the_folder_unless_the_user_has_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    folder = keep_compiled(FACTS, tmp_path)
    assert folder is not None
    assert json.loads((folder / "facts.json").read_text()) == FACTS
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")


def test_only_the_folders_used_last_are_kept_and_nothing_else_is_removed(tmp_path: Path) -> None:
    (tmp_path / "compiled" / "somebody's").mkdir(parents=True)
    made = []
    for number in range(KEPT + 2):
        folder = keep_compiled({**FACTS, "torch": str(number)}, tmp_path)
        assert folder is not None
        os.utime(folder, (number, number))
        made.append(folder)
    keep_compiled({**FACTS, "torch": "0"}, tmp_path)  # was removed, and is made anew
    assert [folder.exists() for folder in made] == [True, False, False, True, True, True]
    assert (tmp_path / "compiled" / "somebody's").exists()


def test_a_home_that_cannot_be_written_or_is_not_there_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compiled").write_text("a file, where a folder should be")
    assert keep_compiled(FACTS, tmp_path) is None
    monkeypatch.delenv("BIGSTEP_DATA", raising=False)
    monkeypatch.setenv("HOME", "~")  # leads nowhere
    assert keep_compiled(FACTS) is None
    assert not set(VARIABLES) & set(os.environ)


def test_the_next_run_of_the_same_shape_is_told_what_the_last_one_took(tmp_path: Path) -> None:
    flush = cast(Flush, SimpleNamespace())
    first = Preparation(tmp_path, "a")
    assert "the last time" not in first.announcement()
    (note,) = first.flushed(flush)
    assert note.facts["first_step_s"] >= 0
    assert not list(first.flushed(flush)), "only the first flush is the first step"
    (tmp_path / "first_steps.json").write_text('{"a": 21.4}')
    assert Preparation(tmp_path, "a").announcement().endswith("; that took 21 s here the last time.")
    assert Preparation(tmp_path, "b").announcement().endswith("graphs recorded.")
    for torn in ("", "[1]", '{"a": "long"}'):
        (tmp_path / "first_steps.json").write_text(torn)
        assert Preparation(tmp_path, "a").announcement().endswith("graphs recorded.")


@pytest.mark.parametrize(
    "settings, said",
    [
        ((), True),
        (("kernels=graphs",), True),
        (("kernels=plain",), False),
        (("kernels=plain", "compile=true"), True),
    ],
)
def test_whatever_compiles_or_records_is_announced_and_kept(settings: tuple[str, ...], said: bool) -> None:
    assert prepares(apply_settings(load("sony"), settings)) is said


@pytest.mark.parametrize(
    "change",
    [
        {"model": "resnet9"},
        {"precision": "bf16"},
        {"compile": True},
        {"plan": ()},
        {"workers": dataclasses.replace(load("sony").workers, count=31)},
    ],
)
def test_another_shape_is_another_entry(change: dict[str, Any]) -> None:
    config = load("sony")
    assert shape_of(dataclasses.replace(config, **change)) != shape_of(config)
    assert shape_of(dataclasses.replace(config, seed=5, epochs=3.0)) == shape_of(config)
