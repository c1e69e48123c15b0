"""`bigstep doctor` on real scripts: started as ranks, watched, stopped; what they compute stays the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigstep.doctor.examination import examine
from bigstep.doctor.launch import Limits, run_world
from bigstep.doctor.settings import Settings
from warm import run_script

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "doctor"

LOSSES = """
import random
import sys

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        noise = torch.randn(8) + random.random() + torch.as_tensor(numpy.random.normal(size=8)).float()
        return noise + index, index % 3


torch.manual_seed(3)
random.seed(4)
numpy.random.seed(5)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for epoch in range(4):
    for points, labels in DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=int(sys.argv[1])):
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(loss.item().hex())
    torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_losses_are_bit_identical_under_observation(tmp_path: Path, workers: int) -> None:
    (tmp_path / "train.py").write_text(LOSSES)
    (tmp_path / "facts").mkdir()
    command = ["train.py", str(workers)]
    plain = run_script(tmp_path / "train.py", str(workers))
    place = str(tmp_path)
    facts = str(tmp_path / "facts")
    settings = Settings(facts=facts, root=place, original=place, own=place, steps=17, ranks=1, detail=10)
    world = run_world(command, settings, tmp_path, Limits(total_s=100, stall_s=100), gpus=False)
    assert world.ended == "stopped"
    losses = world.output.split()
    assert len(losses) == 16, "the seventeenth is stopped before it is printed"
    assert losses == plain.split()[:16]


def test_a_cause_is_named_with_its_line_and_the_exit_status_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bigstep", "doctor", "--json", "past_ddp.py"],
        cwd=EXAMPLES,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    first = result["findings"][0]
    assert first["name"] == "unexchanged-gradients"
    source = (EXAMPLES / "past_ddp.py").read_text().splitlines()
    file, _, line = first["line"].partition(":")
    assert file == "past_ddp.py"
    assert "model.module" in source[int(line) - 1]


def test_ranks_that_a_script_spawns_are_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    result = examine(["spawn_alone.py"], only="gradients")
    assert result.findings[0].name == "unexchanged-gradients"
    assert "no gradient was reduced" in result.findings[0].evidence
    assert any("starts its ranks itself" in note for note in result.notes)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ddp_tutorial", "gpt_loop", "reference_classification", "accelerate_example"])
def test_scripts_in_the_shape_of_well_known_ones_are_healthy(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if script.startswith("accelerate"):
        pytest.importorskip("accelerate", reason="Accelerate is not installed")
    monkeypatch.chdir(EXAMPLES / "known")
    result = examine([f"{script}.py"])
    assert not result.faults, [finding.title for finding in result.faults]
    assert not result.trouble
