"""A full disk: the run goes on, or ends with one sentence in a state that can be resumed; nothing written is harmed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigstep.asynchronous import train_locked
from bigstep.config import CheckpointConfig, DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.data.sources.given import as_pair
from bigstep.engine import weights
from bigstep.engine.checkpoint import load_latest
from bigstep.engine.interruption import StoppedError
from bigstep.errors import RunError
from bigstep.records import read_run
from bigstep.train import fit

SMALL_BYTES = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """`small_disk(folder)` puts a disk of one megabyte there."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        folder.mkdir(parents=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        # lazily: a process of a run that just ended may still hold a file for a moment
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Filling(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Sixty images, five steps an epoch; a disk is filled at the n-th look."""

    classes = ("a", "b", "c")

    def __init__(self, looks: int = 0, folder: Path | None = None) -> None:
        self.images = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.looks, self.folder = looks, folder
        if folder is not None:
            self.looks += looks_of_fingerprint()
        self.saved = looks // len(self.images) * 5  # the step of the checkpoint that is to be whole by then

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.looks -= 1
        if self.looks == 0:
            assert self.folder is not None
            wait_for_checkpoint(self.folder, self.saved)
            fill(self.folder)
        return self.images[index], index % 3


def looks_of_fingerprint() -> int:
    """How often a run looks at its samples before it trains."""
    probe = Filling(looks=1_000_000)
    as_pair((probe, Filling()), 0.0, 0).fingerprint()
    return 1_000_000 - probe.looks


def wait_for_checkpoint(folder: Path, step: int) -> None:
    """Return once the thread that writes the checkpoint of a step, and then removes older ones, has ended.

    The disk must not be filled before: what is removed afterwards would make room. A file that is gone from its folder
    may still hold its room, so the folder does not tell.
    """
    for writer in [thread for thread in threading.enumerate() if thread.name == "checkpoint"]:
        writer.join(timeout=30)
    steps = sorted(int(path.stem.split("-")[-1]) for path in folder.rglob("*.ckpt"))
    assert step in steps, f"no checkpoint of step {step}: {steps}"
    assert len(steps) <= CheckpointConfig().keep, f"older ones beside it: {steps}"


def fill(folder: Path) -> None:
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def order() -> RunConfig:
    return RunConfig(
        workers=WorkersConfig(count=4, local_batch=3), data=DataConfig(loaders=0), epochs=20, precision="float64",
        lr=LrConfig(base=0.05, scaling="none"), evaluate_every=100, checkpoint=CheckpointConfig(every=1),
    )  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 3))


def test_a_run_goes_on_without_room_for_checkpoints_and_the_last_good_one_stays(
    small_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    whole = fit(order(), network(), (Filling(), Filling()), device="cpu")
    folder = tmp_path / "run"
    small_disk(folder / "checkpoints")
    filling = Filling(looks=8 * 60 + 5, folder=folder / "checkpoints")
    with pytest.raises(RunError, match="end at step 100, but its last checkpoint could not be written"):
        fit(order(), network(), (filling, Filling()), out=folder, device="cpu")
    told = [note for note in read_run(folder).notes if "could not be written" in note]
    assert told[0] == (
        f"The checkpoint of step 45 could not be written to {folder / 'checkpoints'} (No space left on device); the "
        "run goes on, and can be resumed from the one before it."
    )
    state, problems = load_latest(folder / "checkpoints")
    assert problems == []
    assert state is not None
    assert state["position"]["step"] == 40
    assert not list(folder.rglob("*.part"))
    (folder / "checkpoints" / "filler").unlink()
    again = fit(order(), network(), (Filling(), Filling()), out=folder, device="cpu", resume=True)
    assert again.weights_sha256 == whole.weights_sha256


def test_an_asynchronous_run_without_room_for_checkpoints_ends_as_usual_and_tells_it(
    small_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    folder, data = tmp_path / "run", Filling()
    small_disk(folder / "checkpoints")
    fill(folder / "checkpoints")
    result = train_locked(replace(order(), epochs=2), network(), (data, data), out=folder, device="cpu")
    assert result.steps == 40
    assert (folder / "model.safetensors").exists()
    last = read_run(folder).notes[-1]
    assert last == f"The weights of update 40 could not be written to {folder} (No space left on device)."


def test_weights_without_room_are_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights, "write_atomically", refuse)
    with pytest.raises(RunError, match=r"^The run has reached its end, but .*model.safetensors cannot be written"):
        fit(order(), network(), (Filling(), Filling()), out=tmp_path / "run", device="cpu", max_steps=1)


def test_a_run_without_room_for_its_records_ends_with_a_sentence_and_can_go_on(
    small_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    whole = fit(order(), network(), (Filling(), Filling()), device="cpu")
    folder = tmp_path / "run"
    small_disk(folder)
    with pytest.raises(RunError) as ending:
        fit(order(), network(), (Filling(8 * 60 + 5, folder), Filling()), out=folder, device="cpu")
    assert str(ending.value) == (
        f"{folder / 'metrics.jsonl'} cannot be written (No space left on device); make room for it, then continue with "
        "--resume."
    )
    (folder / "filler").unlink()
    resumed = fit(order(), network(), (Filling(), Filling()), out=folder, device="cpu", resume=True)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert [row["step"] for row in read_run(folder).train] == list(range(1, 101))


def test_a_run_that_is_stopped_on_a_full_disk_does_not_claim_to_be_saved(
    small_disk: Callable[[Path], None], tmp_path: Path
) -> None:
    class Stopping(Filling):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            item = super().__getitem__(index)
            if self.looks == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return item

    folder = tmp_path / "run"
    small_disk(folder / "checkpoints")
    stopping = Stopping(8 * 60 + 5, folder / "checkpoints")
    with pytest.raises(StoppedError) as ending:
        fit(order(), network(), (stopping, Filling()), out=folder, device="cpu")
    assert "its state could not be saved, but an earlier one may be there" in str(ending.value)
    assert ending.value.exit_status == 143
