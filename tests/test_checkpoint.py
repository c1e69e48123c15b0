"""Checkpoints are whole or refused, and never run code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.engine.build import build
from bigstep.engine.checkpoint import load_checkpoint, load_latest, save_checkpoint, weights_hash
from bigstep.engine.ranks import DeviceChoice, Ranks
from bigstep.errors import DataError
from bigstep.recipes import load
from bigstep.records import read_run
from bigstep.train import fit
from pretended import pretended
from test_host_waits import SMALL, images, network
from worlds import World


def state(step: int) -> dict[str, object]:
    return {"step": step, "weights": torch.arange(1000.0) + step}


def test_round_trip_and_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100_000):
        save_checkpoint(tmp_path, step, state(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000010.ckpt", "step-000100000.ckpt"]
    loaded, problems = load_latest(tmp_path)
    assert loaded is not None
    assert loaded["step"] == 100_000
    assert torch.equal(loaded["weights"], torch.arange(1000.0) + 100_000)
    assert problems == []


@pytest.mark.parametrize("harm", ["truncate", "flip", "empty", "foreign"])
def test_a_harmed_file_is_reported_and_the_one_before_it_used(tmp_path: Path, harm: str) -> None:
    save_checkpoint(tmp_path, 1, state(1), keep=2)
    newest = save_checkpoint(tmp_path, 2, state(2), keep=2)
    content = bytearray(newest.read_bytes())
    if harm == "truncate":
        content = content[: len(content) // 2]
    elif harm == "flip":
        content[len(content) // 2] ^= 1
    elif harm == "empty":
        content = bytearray()
    else:
        content = bytearray(b"something else entirely")
    newest.write_bytes(content)
    loaded, problems = load_latest(tmp_path)
    assert loaded is not None
    assert loaded["step"] == 1
    assert len(problems) == 1
    assert newest.name in problems[0]


def test_a_checkpoint_never_runs_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, (f"open({str(tmp_path / 'owned')!r}, 'w')",))

    path = save_checkpoint(tmp_path, 1, {"x": Attack()}, keep=1)
    with pytest.raises(DataError, match="more than tensors"):
        load_checkpoint(path)
    assert not (tmp_path / "owned").exists()


def test_nothing_to_load_is_no_error(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "missing") == (None, [])


def test_equal_weights_have_equal_hashes_and_one_bit_changes_them() -> None:
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    second = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    second.load_state_dict(first.state_dict())
    assert weights_hash(first) == weights_hash(second)
    with torch.no_grad():
        second[0].weight[0, 0] = torch.nextafter(second[0].weight[0, 0], torch.tensor(9.0))
    assert weights_hash(first) != weights_hash(second)


def test_other_threads_after_a_resume_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = apply_settings(load("plain"), ["model=mlp", "workers.count=2", "workers.local_batch=8"])
    monkeypatch.setenv("OMP_NUM_THREADS", "as they are")  # the user has decided
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        fit(config, out=tmp_path, device="cpu", max_steps=2)
        fit(config, out=tmp_path, device="cpu", max_steps=3, resume=True)
        assert not any("thread" in note for note in read_run(tmp_path).notes)
        torch.set_num_threads(1)
        fit(config, out=tmp_path, device="cpu", max_steps=4, resume=True)
        (told,) = [note for note in read_run(tmp_path).notes if "thread" in note]
        assert told.startswith("The forward pass took 2 threads before the run was resumed and takes 1 thread now.")
    finally:
        torch.set_num_threads(threads)


def statistics_captured(workers: int) -> list[list[str]] | None:
    """Capture the state of a run on this world; return what its statistics hold of each rank, where they are at all."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    stages = [f"workers.count={workers}", "plan=[{epoch: 1, count: 4, local_batch: 32}]"]
    order = apply_settings(load("plain"), [*stages, "data.holdout=0.95", "model=small"])
    with contextlib.closing(build(order, Ranks(rank, size))) as run:
        statistics = run.state.capture()["statistics"]
    return None if statistics is None else [sorted(each) for each in statistics]


@pytest.mark.parametrize("workers", [4, 2])
def test_statistics_travel_to_the_rank_that_writes_them_and_what_is_common_once(
    world: Callable[[int], World], workers: int
) -> None:
    """Of 2,048 ranks with a ResNet-50 every one would hold 870 MB for each checkpoint, if all were handed to all."""
    first, *others = world(3).run(statistics_captured, workers)  # two workers leave a rank to wait
    assert others == [None, None]
    assert first == [["decay", "initial", "share"], ["share"], ["share"]]


@pytest.mark.parametrize("kernels", ["graphs", "plain"])
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")], ids=str)
def test_a_run_goes_on_on_another_kind_of_device(
    devices: tuple[DeviceChoice, DeviceChoice], kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of that device: those that a checkpoint names are another's."""
    monkeypatch.setenv("BIGSTEP_DATA", str(tmp_path / "cache"))
    config = apply_settings(stretch(load("plain"), 1.0), (*SMALL, f"kernels={kernels}"))

    def go(folder: Path, device: DeviceChoice, steps: int, *, resume: bool = False) -> list[float]:
        torch.manual_seed(0)
        model, data = network(), images()
        with pretended() if device == "cuda" else contextlib.nullcontext():
            fit(config, model, data, out=folder, device=device, max_steps=steps, resume=resume)
        return [row["loss"] for row in read_run(folder).train]

    whole = go(tmp_path / "whole", "cpu", 8)
    go(tmp_path / "parts", devices[0], 4)
    parts = go(tmp_path / "parts", devices[1], 8, resume=True)
    assert parts == pytest.approx(whole, rel=1e-5)  # float32, along 8 steps
