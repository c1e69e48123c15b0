"""Every example runs as it stands, in a folder of its own, and says what it is there to show.

Most run in this process, since an import of torch takes longer than they do; those that start processes of their own,
or set loggers and signals, are programs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
HERE = {
    "own_loop.py": "% on its own images",
    "own_model.py": "weights [1.0, -2.0, 0.5]",
    "pipeline.py": "over 5 folds",
    "results.py": "mean ",
    "text.py": "bits per byte after 40 steps: 'The quick ",
    "with_pandas.py": "over 10 steps",
}
# (words, what is to be installed, ranks)
PROGRAMS = {
    "exchange.py": ("kB, in float32 ", "torch", 1),
    "with_lightning.py": ("% on 2 rank(s)", "lightning", 2),
    "with_accelerate.py": ("kB sent by a rank", "accelerate", 2),
    "with_trainer.py": (" after 30 steps of LAMB", "transformers", 1),
    "with_transformers.py": (" of new sentences after 64 steps of AdamW", "transformers", 2),
}
NEEDS = {"with_pandas.py": "pandas", "pipeline.py": "sklearn"}
MOST_LINES = 60


def require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'bigstep[examples]'")


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*HERE, *PROGRAMS}
    assert [path.name for path in EXAMPLES.glob("*.ipynb")] == ["notebook.ipynb"]
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < MOST_LINES, f"{path.name} is no example to read at a glance"


@pytest.mark.parametrize("name", list(HERE))
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require(NEEDS.get(name, "torch"))
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert HERE[name] in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_an_example_runs_as_a_program(name: str, tmp_path: Path) -> None:
    words, package, ranks = PROGRAMS[name]
    require(package)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    """Its code cells in one namespace, as a kernel would; it is kept without outputs."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert sum(len(cell["source"]) for cell in notebook["cells"]) < MOST_LINES
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"notebook.ipynb, cell {number}", "exec"), namespace)
    said = capsys.readouterr().out
    assert "logical workers" in said
    assert "% after 20 steps" in said
    assert "parameters" in said


def test_a_recipe_in_a_file_trains(bigstep: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    recipe = str(EXAMPLES / "recipe.yaml")
    status, out, err = bigstep("train", "--config", recipe, "--steps", "2", "--device", "cpu")
    assert status == 0, err
    assert (tmp_path / "runs" / "mine-custom" / "model.safetensors").is_file()
    assert "Weights: runs/mine-custom/model.safetensors" in out
