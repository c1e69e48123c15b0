"""Every example runs as it stands, in a folder of its own, and says what it is there to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "own_loop.py": "% on its own images",
    "own_model.py": "weights [1.0, -2.0, 0.5]",
    "exchange.py": "kB, in float32 ",
    "pipeline.py": "over 5 folds",
    "results.py": "mean ",
}


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, f"{path.name} is no example to read at a glance"


@pytest.mark.parametrize("name", list(SAYS))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


def test_a_recipe_in_a_file_trains(tmp_path: Path) -> None:
    from bigstep.engine.launch import program

    command = program("train", "--config", str(EXAMPLES / "recipe.yaml"), "--steps", "2", "--device", "cpu")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "mine-custom" / "model.safetensors").is_file()
    assert "Weights: runs/mine-custom/model.safetensors" in done.stdout
