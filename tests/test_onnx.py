"""A trained network in ONNX gives the answers of the network, for a batch of any size, and a failure harms no file."""

from __future__ import annotations

import functools
import importlib.util
import logging
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bigstep
from bigstep import recipes
from bigstep.cli import app
from bigstep.config.text import apply_settings
from bigstep.errors import ConfigError

MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install {' '.join(MISSING)}")

SETTINGS = ["workers.count=2", "workers.local_batch=4", "seed=3"]


class Bessel(nn.Linear):
    """Uses a function that torch has and ONNX has not."""

    def __init__(self, classes: int, image_size: int) -> None:
        super().__init__(image_size**2, classes)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.special.bessel_j0(x.flatten(1)))


def trained(folder: Path, recipe: str, model: str) -> Path:
    config = apply_settings(recipes.load(recipe), [*SETTINGS, f"model={model}"])
    bigstep.fit(config, out=folder, max_steps=1, device="cpu")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "run", "plain", "small")


def export(run: Path, to: Path, *options: str) -> None:
    app(["export", str(run), str(to), *options], standalone_mode=False)


def answers(file: Path, inputs: Tensor) -> Tensor:
    from onnxruntime import InferenceSession

    session = InferenceSession(file)
    (taken,) = session.get_inputs()
    assert taken.shape[0] == "batch"
    (found,) = session.run(["output"], {taken.name: inputs.numpy()})
    return torch.from_numpy(found)


def inputs_of(recipe: str, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    if recipe == "adamw":
        return torch.randint(0, 256, (batch, 64), generator=generator)
    return torch.randn(batch, 1, 28, 28, generator=generator)


@pytest.mark.parametrize(
    "recipe, model", [("plain", "small"), ("plain", "resnet9"), ("adamw", "gpt-mini"), ("adamw", "lstm-mini")]
)
def test_onnx_gives_the_network_s_answers_for_any_batch(recipe: str, model: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", recipe, model)
    export(run, tmp_path / "model.onnx")
    network = bigstep.load(run).model
    for batch in (1, 2, 5):
        inputs = inputs_of(recipe, batch)
        with torch.no_grad():
            expected = network(inputs)
        off = (answers(tmp_path / "model.onnx", inputs) - expected).abs().max() / expected.abs().max()
        assert off < 1e-5  # another order of float32 sums: 1.3e-6 is the most that any of our networks showed


def test_large_weights_lie_beside_the_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = functools.partialmethod(torch.onnx.ONNXProgram.save, external_data=True)  # as torch does beyond 1.5 GB
    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", apart)
    export(run, tmp_path / "model.onnx")
    names = ["model.onnx", "model.onnx.data"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert "model.onnx and " in capsys.readouterr().out
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in names:
        shutil.copy(tmp_path / name, moved)
    inputs = inputs_of("plain", 3)
    assert torch.allclose(answers(moved / "model.onnx", inputs), bigstep.load(run).model(inputs), atol=1e-5)
    (tmp_path / "model.onnx").unlink()
    (tmp_path / "model.onnx.data").write_text("a month of work")
    with pytest.raises(ConfigError, match="model.onnx.data already exists; add --force"):
        export(run, tmp_path / "model.onnx")
    assert [path.read_text() for path in tmp_path.glob("model.*")] == ["a month of work"]


def test_torch_s_remarks_about_itself_stay_out_of_sight(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "bigstep", "export", str(run), str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_an_export_that_fails_leaves_what_was_there(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    target.write_text("a month of work")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then it is an error, as a full disk is
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
    try:
        with pytest.raises(ConfigError, match=r"model.onnx cannot be written \(.*\); name another file"):
            export(run, target, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert target.read_text() == "a month of work"


def test_a_network_that_onnx_cannot_say_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGSTEP_TRUST", "1")
    run = trained(tmp_path / "run", "plain", f"{__name__}:Bessel")
    export(run, tmp_path / "model.pt2")
    level, filters = logging.getLogger("torch.onnx").level, list(warnings.filters)
    with pytest.raises(ConfigError, match=r"to ONNX \(.*bessel_j0.*\); export it as \.pt2") as caught:
        export(run, tmp_path / "model.onnx")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "model.onnx").exists()
    assert (logging.getLogger("torch.onnx").level, list(warnings.filters)) == (level, filters)
