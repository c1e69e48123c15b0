"""A run folder is a configuration: the same run again, changed or not. What a program brought is the program's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bigstep.config import LrConfig, RunConfig, WorkersConfig
from bigstep.records import RunWriter, read_run
from bigstep.train import fit

Bigstep = Callable[..., tuple[int, str, str]]


@pytest.fixture
def first(bigstep: Bigstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one step with settings of its own."""
    monkeypatch.chdir(tmp_path)
    changed = ("--model", "mlp", "--lr", "0.3", "--seed", "5", "--workers", "4")
    assert bigstep("train", "sony", "--steps", "1", "--device", "cpu", "--out", "first", *changed)[0] == 0
    return Path("first")


@pytest.mark.parametrize("named", ["first", "first/run.json"])
def test_a_run_is_repeated_from_its_folder(bigstep: Bigstep, first: Path, named: str) -> None:
    status, _, told = bigstep("train", "--config", named, "--steps", "1", "--device", "cpu", "--out", "again")
    assert status == 0, told
    one, other = read_run(first), read_run(Path("again"))
    assert one.config == other.config
    assert one.result["weights_sha256"] == other.result["weights_sha256"]


def test_a_run_is_repeated_with_a_change(bigstep: Bigstep, first: Path) -> None:
    words = ("train", "--config", "first", "--lr", "0.1", "--steps", "1", "--device", "cpu", "--out", "again")
    assert bigstep(*words)[0] == 0
    config = read_run(Path("again")).config
    assert config.pop("lr")["base"] == 0.1
    assert config == {name: value for name, value in read_run(first).config.items() if name != "lr"}


@pytest.mark.parametrize(
    "words", [("--config", "own"), ("--resume", "--out", "own"), ("plain", "--resume", "--out", "own")]
)
def test_what_a_program_brought_is_not_asked_of_the_command_line(
    bigstep: Bigstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """It said that the checkpoint does not fit, and to remove it."""
    monkeypatch.chdir(tmp_path)
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    data, config = (
        TensorDataset(inputs, inputs.argmax(1)),
        RunConfig(workers=WorkersConfig(count=4, local_batch=4), epochs=2, lr=LrConfig(base=0.05, scaling="none")),
    )
    fit(config, nn.Linear(3, 3), (data, data), out="own", device="cpu", max_steps=2)
    kept = sorted(Path("own").rglob("*"))
    status, _, told = bigstep("train", *words)
    assert status == 2
    assert told.startswith("bigstep: The run in own took its model and data from a program, which alone can train it")
    assert sorted(Path("own").rglob("*")) == kept


def test_a_broken_run_is_in_nobody_s_way_unless_it_is_the_only_one(bigstep: Bigstep, first: Path) -> None:
    Path("runs/broken").mkdir(parents=True)
    Path("runs/broken/run.json").write_text("{")
    assert "runs/broken/run.json" in bigstep("train", "--resume")[2]
    begun = RunWriter(Path("runs/begun"), read_run(first).config)
    begun.close()
    status, _, told = bigstep("train", "--resume", "--steps", "1", "--device", "cpu")
    assert status == 0, told
    assert read_run(Path("runs/begun")).result
