"""Training on a GPU: graphs and fused kernels take the path of plain torch, and say that they ran. Run by hand."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from bigstep.config import RunConfig
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.recipes import load
from bigstep.train import fit

pytestmark = pytest.mark.gpu

TRAIN, TEST = 480, 100


def images() -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    from bigstep.data.sources.memory import TensorImages

    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(10, (TRAIN + TEST,), generator=generator)
    noise = torch.randint(0, 128, (TRAIN + TEST, 3, 32, 32), generator=generator)
    pixels = (noise + 12 * labels.view(-1, 1, 1, 1)).to(torch.uint8)  # brighter classes: something to learn
    whole = TensorImages(
        images=pixels, labels=labels, classes=tuple("abcdefghij"), mean=(0.5,) * 3, std=(0.25,) * 3, name="made"
    )
    return whole.subset(torch.arange(TRAIN)), whole.subset(torch.arange(TRAIN, TRAIN + TEST))


def config(recipe: str, *settings: str) -> RunConfig:
    base = stretch(load(recipe, "cifar10"), 4)
    count = 1 if base.plan and recipe != "fastai" else 4  # plans of the others grow it fourfold
    small = apply_settings(base, [f"workers.count={count}", "evaluate_every=4", *settings])
    return dataclasses.replace(small, seed=1)


def losses(folder) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "float32"])
@pytest.mark.parametrize("recipe", ["plain", "sony", "pfn", "onebit", "fastai", "leap"])
def test_graphs_follow_plain_torch(recipe, precision, tmp_path) -> None:
    data = images()
    for kernels in ("auto", "plain"):
        settings = (f"precision={precision}", f"kernels={kernels}")
        fit(config(recipe, *settings), data=data, out=tmp_path / kernels, device="cuda")
    ours, plain = losses(tmp_path / "auto"), losses(tmp_path / "plain")
    assert len(ours) == len(plain)
    # one step of half precision differs by rounding; a dozen steps amplify it, so the mean is compared
    close = 0.02 if precision == "float32" else 0.1
    assert ours[0] == pytest.approx(plain[0], rel=close / 4)
    assert sum(ours) / len(ours) == pytest.approx(sum(plain) / len(plain), rel=close)
    notes = "".join((tmp_path / "auto" / name).read_text() for name in ("run.json", "metrics.jsonl"))
    assert "a CUDA graph for each step" in notes
    assert ("fused modules" in notes) == (precision != "float32")


def test_a_sprint_is_fused_graphed_and_learns(tmp_path) -> None:
    small = ("workers.count=2", "workers.local_batch=48", "evaluate_views=6")
    result = fit(apply_settings(load("muon", "sprint"), small), data=images(), out=tmp_path / "run", device="cuda")
    notes = (tmp_path / "run" / "metrics.jsonl").read_text() + (tmp_path / "run" / "run.json").read_text()
    assert "6 fused modules, a CUDA graph for each step" in notes
    assert result.accuracy > 0.5  # one in ten by guessing; the classes differ by their brightness alone
    assert result.facts["accuracy_views"] > 0.5
    assert result.facts["skipped_steps"] == 0


def test_parts_of_a_batch_give_what_the_whole_gives(tmp_path, monkeypatch) -> None:
    from bigstep.engine import build

    data = images()
    fit(config("fujitsu"), data=data, out=tmp_path / "whole", device="cuda")
    monkeypatch.setattr(build, "GPU_SAMPLES_PER_FORWARD", 64)
    fit(config("fujitsu"), data=data, out=tmp_path / "parts", device="cuda")
    for whole, parts in zip(losses(tmp_path / "whole")[:4], losses(tmp_path / "parts")[:4], strict=True):
        assert parts == pytest.approx(whole, rel=0.02)  # fp16 sums in another order


def test_a_resumed_run_goes_on_with_its_scale_and_velocity(tmp_path) -> None:
    data = images()
    order = config("lars", "checkpoint.every=1")
    fit(order, data=data, out=tmp_path / "whole", device="cuda")
    fit(order, data=data, out=tmp_path / "cut", device="cuda", max_steps=6)
    fit(order, data=data, out=tmp_path / "cut", device="cuda", resume=True)
    whole, cut = losses(tmp_path / "whole"), losses(tmp_path / "cut")
    assert len(whole) == len(cut)
    for a, b in zip(whole[6:9], cut[6:9], strict=True):
        assert math.isclose(a, b, rel_tol=0.02)  # convolutions may take another algorithm after a restart


@pytest.mark.parametrize(
    "settings",
    [
        ("exchange.codec=none",),
        ("exchange.codec=none", "exchange.collective=halving"),
        ("exchange.codec=none", "exchange.collective=torus"),
        ("exchange.codec=onebit", "exchange.collective=gather", "exchange.warmup_steps=0"),
    ],
)
def test_ranks_that_share_a_gpu_train_as_they_do_on_the_cpu(settings, tmp_path) -> None:
    import subprocess
    import sys

    sets = [word for setting in ("model=mlp", "lr.base=0.02", *settings) for word in ("--set", setting)]
    for device in ("cpu", "shared"):
        command = [sys.executable, "-m", "bigstep", "train", "plain", "--procs", "2", "--device", device, *sets]
        subprocess.run(
            [*command, "--epochs", "1", "--no-report", "--json", "--out", tmp_path / device], check=True, timeout=120
        )
    # float32 sums in another order, and a 1-bit code of a value near 0 may then differ
    close = 0.02 if "exchange.codec=onebit" in settings else 1e-3
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "cpu"), rel=close)


@pytest.mark.parametrize("codec", ["none", "int4", "onebit", "exact"])
def test_islands_that_meet_beside_their_steps_train_on_a_gpu_as_they_do_on_the_cpu(codec, tmp_path) -> None:
    import subprocess
    import sys

    islands = ("count=2", "every=4", "overlap=2", "fragments=2", "begin=0", f"codec={codec}")
    sets = ["model=mlp", "lr.base=0.02", *(f"islands.{setting}" for setting in islands)]
    for device in ("cpu", "shared"):
        command = [sys.executable, "-m", "bigstep", "train", "localsgd", "--procs", "2", "--device", device]
        command += [word for setting in sets for word in ("--set", setting)]
        subprocess.run(
            [*command, "--epochs", "1", "--no-report", "--json", "--out", tmp_path / device], check=True, timeout=120
        )
    close = 1e-3 if codec in ("none", "exact") else 0.02  # as above
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "cpu"), rel=close)


def sentences(device: str) -> torch.utils.data.TensorDataset:
    """Sequences that count upwards from a random byte, the last four targets padding: something to learn."""
    first = torch.randint(256, (96, 1), generator=torch.Generator().manual_seed(5))
    tokens = ((first + torch.arange(33)) % 256).to(device)
    targets = tokens[:, 1:].clone()
    targets[:, -4:] = -100
    return torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), targets)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch 2.11, while it imports its compiler
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("settings", [("kernels=graphs",), ("kernels=graphs", "compile=true"), ("compile=true",)])
def test_steps_of_an_own_transformer_follow_plain_torch(settings, tmp_path) -> None:
    from bigstep.models import GPT

    base = apply_settings(
        load("adamw", "mini"),
        ["workers.count=4", "workers.local_batch=6", "lr.base=0.003", "precision=bf16", "evaluate_every=5"],
    )
    data = sentences("cuda")
    for name, more in (("plain", ("kernels=plain",)), ("tried", settings)):
        torch.manual_seed(0)
        model = GPT(vocabulary=256, length=32, depth=2, width=64, heads=2)
        fit(apply_settings(stretch(base, 5), more), model, (data, data), out=tmp_path / name, device="cuda")
    plain, tried = losses(tmp_path / "plain"), losses(tmp_path / "tried")
    assert len(plain) == len(tried) == 20
    assert tried[0] == pytest.approx(plain[0], rel=0.01)  # bf16 rounds at 0.004
    assert sum(tried) / 20 == pytest.approx(sum(plain) / 20, rel=0.03)
    assert plain[-1] < 0.7 * plain[0]
    notes = "".join((tmp_path / "tried" / name).read_text() for name in ("run.json", "metrics.jsonl"))
    assert ("a CUDA graph for each step" in notes) == ("kernels=graphs" in settings)


def test_targets_on_the_device_are_counted_once_and_on_the_host() -> None:
    from bigstep.data.sources.given import as_source

    source = as_source(sentences("cuda"))
    counts = source.targets(torch.arange(5))
    assert counts is not None
    assert counts.device.type == "cpu"
    assert counts.tolist() == [28] * 5
