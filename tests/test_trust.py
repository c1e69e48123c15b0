"""What a stranger's file can do: nothing runs, nothing hangs, nothing good is deleted, no memory is taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bigstep.config import RunConfig
from bigstep.config.text import config_from_mapping, config_to_yaml
from bigstep.engine.checkpoint import load_checkpoint, load_latest, save_checkpoint
from bigstep.engine.observers.watches import StragglerWatch, loads_of_ranks
from bigstep.errors import ConfigError, DataError
from bigstep.records import RunWriter

Bigstep = Callable[..., tuple[int, str, str]]

MODULE = """
import pathlib
pathlib.Path("ran").touch()

def data(path=""):
    import torch
    from torch.utils.data import TensorDataset
    images = torch.zeros(64, 1, 8, 8)
    both = TensorDataset(images, torch.arange(64) % 3)
    return both, both
"""


def small(**changes: object) -> RunConfig:
    base = {"model": "mlp", "workers": {"count": 2, "local_batch": 4}, "epochs": 1, "lr": {"base": 0.1}}
    return config_from_mapping({**base, **changes})


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that leaves a trace when it is imported; it is also the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("BIGSTEP_TRUST", raising=False)
    (tmp_path / f"stranger_{tmp_path.name}.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(config_to_yaml(small(data={"name": f"stranger_{tmp_path.name}:data"})))
    return tmp_path


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_configuration_runs_no_code_that_nobody_has_confirmed(bigstep: Bigstep, stranger: Path, command: str) -> None:
    status, _, told = bigstep(command, "--config", "run.yaml")
    assert status == 2
    assert "run.yaml names stranger_" in told
    assert "--trust" in told
    assert not (stranger / "ran").exists()


def test_a_suite_runs_no_code_that_nobody_has_confirmed(bigstep: Bigstep, stranger: Path) -> None:
    name = f"stranger_{stranger.name}:data"
    (stranger / "mine.yaml").write_text(f"- {{recipe: plain, seeds: 1, set: {{data.name: '{name}'}}}}\n")
    status, _, told = bigstep("bench", "mine.yaml")
    assert status == 2
    assert "--trust" in told
    assert not (stranger / "ran").exists()


def test_a_run_folder_runs_no_code_that_nobody_has_confirmed(bigstep: Bigstep, stranger: Path) -> None:
    from bigstep.config.text import config_to_mapping

    config = small(data={"name": f"stranger_{stranger.name}:data"})
    RunWriter(stranger / "theirs", config_to_mapping(config), keep_until_step=0).close()
    status, _, told = bigstep("train", "--resume", "--out", "theirs")
    assert status == 2
    assert "theirs names stranger_" in told
    assert not (stranger / "ran").exists()


@pytest.mark.parametrize("way", ["--trust", "variable", "typed"])
def test_whoever_confirms_gets_it_run(
    bigstep: Bigstep, stranger: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    words = ["train", "--config", "run.yaml", "--steps", "1", "--out", "out", "--no-report", "--device", "cpu"]
    if way == "variable":
        monkeypatch.setenv("BIGSTEP_TRUST", "1")
    more = {"--trust": ["--trust"], "variable": [], "typed": ["--set", f"data.name=stranger_{stranger.name}:data"]}
    status, _, told = bigstep(*words, *more[way])
    assert status == 0, told
    assert (stranger / "ran").exists()


@pytest.mark.parametrize("name", ["os:system", "sys:exit", "subprocess:run", "builtins:eval", "os.path:exists"])
def test_functions_of_python_itself_are_never_taken(name: str) -> None:
    for changes in ({"model": name}, {"data": {"name": name, "path": "id"}}):
        with pytest.raises(ConfigError, match="module of Python itself"):
            small(**changes)


def test_corrupt_checkpoints_with_higher_numbers_do_not_drive_out_good_ones(tmp_path: Path) -> None:
    for step in (9, 10):
        save_checkpoint(tmp_path, step, {"step": step}, keep=2)
        (tmp_path / f"step-{step:09d}.ckpt").write_bytes(b"torn")
    for step in (4, 5, 6):
        save_checkpoint(tmp_path, step, {"step": step}, keep=2)
    state, problems = load_latest(tmp_path)
    assert state == {"step": 6}
    assert len(problems) == 2
    assert not (tmp_path / "step-000000004.ckpt").exists()
    assert (tmp_path / "step-000000005.ckpt").exists()


def test_a_pipe_among_the_checkpoints_is_passed_over(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"step": 1}, keep=2)
    os.mkfifo(tmp_path / "step-000000002.ckpt")
    state, problems = load_latest(tmp_path)  # would wait for ever
    assert state == {"step": 1}
    assert problems == [f"The checkpoint {tmp_path / 'step-000000002.ckpt'} is not a file."]


@pytest.mark.parametrize("shown", ["stride 0", "many times"])
def test_a_small_checkpoint_does_not_stand_for_gigabytes(tmp_path: Path, shown: str) -> None:
    few = torch.zeros(1000)
    state = {"w": few[:1].expand(10**9)} if shown == "stride 0" else {"w": [few[:] for _ in range(10_000)]}
    path = save_checkpoint(tmp_path, 1, state, keep=1)
    with pytest.raises(DataError, match="larger than"):
        load_checkpoint(path)
    tied = torch.zeros(1000)
    assert load_checkpoint(save_checkpoint(tmp_path, 2, {"head": tied, "embedding": tied}, keep=1))


def test_a_rank_that_hosts_more_workers_is_no_straggler() -> None:
    watch, data = StragglerWatch(), [0.0, 0.0, 0.0]
    loads = loads_of_ranks(4, 3)
    assert sorted(loads) == [1, 1, 2]
    usual = [float(load) for load in loads]
    assert [watch.see(usual, data, loads) for _ in range(4)] == [None] * 4
    slow = [2.0 * each if rank == loads.index(2) else each for rank, each in enumerate(usual)]
    told = [watch.see(slow, data, loads) for _ in range(2)]
    assert told[1] is not None
    assert told[1].startswith(f"Rank {loads.index(2)} takes 2.0 times as long")


def test_a_rank_with_little_to_do_is_not_accused_of_what_every_rank_does_once() -> None:
    watch, loads = StragglerWatch(), [1, 1, 4]
    once, each = 1.0, 0.1  # an update takes longer than a worker
    assert [watch.see([once + each * load for load in loads], [0.0] * 3, loads) for _ in range(3)] == [None] * 3
