"""A user's mistake is one sentence on stderr and exit status 2; nothing that was there is harmed."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import shlex
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bigstep.engine.launch import program


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


YAML = "workers: {count: 2, local_batch: 4}\nepochs: 1\nlr: {base: 0.1}\n"

ONE_SMALL_WORKER = [
    "--set", "data.image_size=32", "--set", "model=mlp", "--set", "workers.count=1", "--set", "workers.local_batch=2",
]  # fmt: skip

LONG = "x" * 5_000

# (arguments, words that the sentence must hold)
CASES: list[tuple[list[str], str]] = [
    (["train", "sonny"], "did you mean 'sony'"),
    (["train", "resnet"], "recipe"),
    (["train", "--preset", "papr"], "did you mean 'paper'"),
    (["train", "--set", "lr.bse=1"], "did you mean 'lr.base'"),
    (["train", "--set", "workrs.count=4"], "did you mean 'workers"),
    (["train", "--set", "lr.base"], "FIELD=VALUE"),
    (["train", "--set", "lr.base=fast"], "takes a number"),
    (["train", "--set", "lr.base=-1"], "greater than 0"),
    (["train", "--lr", "fast"], "'fast'"),
    (["train", "--procs", "-7"], "-7"),
    (["data", "--length", "0.5"], "'0.5'"),
    (["export", "nowhere", "x.pt"], "nowhere does not exist"),
    (["train", "--set", "workers.count=0"], "greater than 0"),
    (["train", "--set", "workers.count=1.5"], "a whole number"),
    (["train", "--set", "workers.local_batch=x"], "a whole number"),
    (["train", "--set", "optimizer.name=adam"], "optimizer.name"),
    (["train", "--set", "precision=fp8"], "precision"),
    (["train", "--set", "precision=fp16", "--device", "cpu"], "needs a GPU"),
    (["train", "--set", "exchange.codec=onebit"], "collective=gather"),
    (["train", "--set", "norm.momentum=2"], "less than 1"),
    (["train", "--set", "loss.label_smoothing=-0.1"], "at least 0"),
    (["train", "--set", "seed=-3"], "between 0 and"),
    (["train", "--set", "model=resnet51"], "did you mean 'resnet50'"),
    (["train", "--set", "model=no_such_module:net"], "no_such_module"),
    (["train", "--set", "model=yaml:nothing"], "nothing"),
    (["train", "--set", "workers.count=100000"], "larger than the training set"),
    (["train", "--set", "plan=[{epoch: 1, count: 9000, local_batch: 2}]"], "larger than the training set"),
    (["train", "--epochs", "0"], "greater than 0"),
    (["train", "--epochs", "-2"], "greater than 0"),
    (["train", "--epochs", "nan"], "greater than 0"),
    (["train", "--steps", "0"], "--steps"),
    (["train", "--procs", "0"], "--procs"),
    (["train", "--profile", "0"], "a number of steps"),
    (["train", "--profile", "-4"], "a number of steps"),
    (["train", "--profile", "some"], "--profile"),
    (["train", "--profile", "3", "--steps", "4"], "steps of warm-up"),
    (["train", "downpour", "--profile", "3"], "asynchronous"),
    (["train", "--device", "tpu"], "auto, cpu, cuda or shared"),
    (["train", "--config", "missing.yaml"], "cannot be read"),
    (["train", "--config", "."], "cannot be read"),
    (["train", "--config", "broken.yaml"], "not valid YAML"),
    (["train", "--config", "list.yaml"], "must be a mapping"),
    (["train", "--config", "binary.yaml"], "not a text file"),
    (["train", "--config", "partial.yaml"], "lacks the field"),
    (["train", "--config", "unknown.yaml"], "did you mean"),
    (["train", "lars", "--config", "good.yaml"], "give one"),
    (["train", "--out", "file.txt"], "is a file"),
    (["train", "--out", "file.txt/run"], "cannot be written"),
    (["train", "--out", "mine"], "not empty"),
    (["train", "--data", "cifr10"], "did you mean 'cifar10'"),
    (["train", "--data", "nowhere/folder"], "there is no 'nowhere' in"),
    (["train", "--data", "corrupt/trian"], "there is no 'trian' in"),
    (["data", "~no.such.user/images"], "there is no '~no.such.user' in"),
    (["train", "--config", "good.yaml", "--preset", "paper"], "is a whole configuration"),
    (["check", "--config", "good.yaml", "--preset", "paper"], "is a whole configuration"),
    (["train", "--preset", "paper"], "--data DIR"),
    (["recipes", "--yaml"], "name it, as in bigstep recipes sony --yaml"),
    (["train", "--data", "mine"], "lower data.length, or give more text"),
    (["train", "--data", "empty-class"], "empty-class/train/b"),
    (["train", "--data", "corrupt", *ONE_SMALL_WORKER], "corrupt/train/a/2.jpg"),
    (["train", "--data", "short-idx"], "train-images-idx3-ubyte"),
    (["train", "--data", "labels-idx"], "labels"),
    (["train", "--data", "yaml:nothing"], "nothing"),
    (["report", "mine"], "run"),
    (["report", "nowhere"], "nowhere"),
    (["report", "newer"], "format"),
    (["recipes", "fare"], "did you mean 'fair'"),
    (["recipes", "fair", "--yaml", "--json"], "give one of them"),
    (["bench", "--epochs", "0"], "--epochs is 0.0"),
    (["bench", "--epochs", "nan"], "--epochs is nan"),
    (["bench", "--device", "gpu"], "auto, cpu, cuda or shared"),
    (["bench", "--recipes", ","], "names no recipe"),
    (["data", "pack", "mine"], "2 paths"),
    (["probe", "--model", "resnt18"], "did you mean 'resnet18'"),
    (["recipes", "fair", "--preset", "x"], "preset"),
    (["data", "cifr"], "neither a known set nor a path"),
    (["data", "embedded", "--sheet", "file.txt"], "file.txt"),
    (["train", "--timeout", "inf"], "1 to 1,000,000 seconds"),
    (["train", "--timeout", "nan"], "1 to 1,000,000 seconds"),
    (["train", "hogwild", "--data", "two.svm", "--epochs", "nan"], "whole epochs"),
    (["train", "hogwild", "--data", "two.svm", "--epochs", "inf"], "whole epochs"),
    (["train", "hogwild", "--data", "two.svm", "--epochs", "1e30"], "whole epochs"),
    (["train", "hogwild", "--data", "two.svm", "--procs", "2"], "--procs was given"),
    (["train", LONG], "Unknown recipe"),
    (["train", "--out", LONG], "File name too long"),
    (["train", "--data", LONG], "File name too long"),
    (["train", "--config", LONG], "cannot be read"),
    (["train", "--resume", "--out", "text-config"], "config is 'x'"),
    (["train", "--resume", "--out", "nothing-here"], "finds no run in nothing-here"),
    (["train", "downpour", "--set", "asynchronous.shards=100000"], "would only wait for one another"),
    (["train", "downpour", "--set", "asynchronous.replicas=100000"], "would only wait for one another"),
    (["probe", "--device", "tpu"], "cpu or cuda"),
    (["plan", "--validate", "--html", "page.html"], "leave one of them out"),
    (["plan", "--html", "nodir/page.html"], "no folder nodir"),
    (["plan", "--sweep", "gpus=²..³"], "gpus=FIRST..LAST"),
    (["report", "mine", "--html", "file.txt/page.html"], "no folder file.txt"),
    (["report", LONG], "File name too long"),
    (["bench", "date.yaml"], "which no field takes"),
    (["bench", "nested.yaml"], "not valid YAML"),
]  # fmt: skip


def lay_out(folder: Path) -> None:
    """Files that the cases stumble over."""
    from PIL import Image

    (folder / "good.yaml").write_text(YAML)
    (folder / "broken.yaml").write_text("workers: {count: [\n")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x9f")
    (folder / "partial.yaml").write_text("epochs: 1\n")
    (folder / "unknown.yaml").write_text(YAML + "optimiser: {name: lars}\n")
    (folder / "file.txt").write_text("mine")
    (folder / "two.svm").write_text("1 1:1\n-1 2:1\n")
    (folder / "date.yaml").write_text("- {recipe: plain, set: {lr.base: 2020-01-01}}\n")
    (folder / "nested.yaml").write_text("[" * 5_000)
    (folder / "text-config").mkdir()
    (folder / "text-config" / "run.json").write_text(json.dumps({"format": 1, "config": "x"}))
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("do not touch")
    (folder / "newer").mkdir()
    (folder / "newer" / "run.json").write_text(json.dumps({"format": 10_000}))
    for name in ("empty-class", "corrupt"):
        for split in ("train", "val"):
            for label in ("a", "b"):
                place = folder / name / split / label
                place.mkdir(parents=True)
                for number in range(3):
                    if not (name == "empty-class" and label == "b" and split == "train"):
                        Image.new("RGB", (40, 40), (40 * number, 9, 9)).save(place / f"{number}.jpg")
    (folder / "corrupt" / "train" / "a" / "2.jpg").write_bytes(b"\xff\xd8\xff this is no image")
    for name, pixels, labels in (("short-idx", 5, 4), ("labels-idx", 4 * 28 * 28, 3)):
        place = folder / name
        place.mkdir()
        for split in ("train", "t10k"):
            with gzip.open(place / f"{split}-images-idx3-ubyte.gz", "wb") as file:
                file.write(struct.pack(">IIII", 0x803, 4, 28, 28) + bytes(pixels))
            with gzip.open(place / f"{split}-labels-idx1-ubyte.gz", "wb") as file:
                file.write(struct.pack(">II", 0x801, labels) + bytes(labels))


@pytest.mark.parametrize(("arguments", "words"), CASES, ids=[" ".join(arguments)[:80] for arguments, _ in CASES])
def test_a_mistake_is_one_sentence_and_harms_nothing(
    bigstep: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: list[str], words: str
) -> None:
    lay_out(tmp_path)
    before, children = snapshot(tmp_path), set(multiprocessing.active_children())
    status, out, err = bigstep(*arguments)
    assert status == 2, err
    assert set(multiprocessing.active_children()) <= children, "processes were left behind"
    flat = " ".join(err.split())
    assert words.lower() in flat.lower(), err
    assert "Traceback" not in err
    assert len(err) < 2_000, "a long name is not told in full"
    if "bigstep: " in err:  # else the command line itself was refused
        assert err.splitlines()[-1].startswith("bigstep: "), f"the mistake is not the last word: {err!r}"
        assert err.count("bigstep: ") == 1
    assert out == ""
    after = snapshot(tmp_path)
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize(("variables", "words"), [
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"), ({"WORLD_SIZE": "2"}, "RANK is not set"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
])  # fmt: skip
def test_an_environment_that_cannot_be_is_one_sentence(
    bigstep: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, out, err = bigstep("train", "--steps", "1")
    assert (status, out) == (2, "")
    assert err.startswith("bigstep: ")
    assert words in err


def test_a_current_folder_that_is_gone_is_one_sentence(
    bigstep: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, _, err = bigstep("recipes")
    assert (status, err) == (2, "bigstep: The current folder no longer exists; change to another one.\n")


@pytest.mark.parametrize("stream, optimized", [(1, ""), (2, ""), (1, "1")])
def test_a_closed_stream_is_no_traceback_and_no_file_takes_its_number(
    stream: int, optimized: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", optimized)  # 1 leaves out what is asserted
    train = "train --steps 1 --model mlp --workers 2 --out run --device cpu"
    for words in ("recipes", train):
        done = subprocess.run(
            f"{shlex.join(program())} {words} {stream}>&-", shell=True, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    assert "epoch" not in (tmp_path / "run" / "run.json").read_text().partition('"result"')[2]


def test_there_are_forty_cases() -> None:
    assert len(CASES) >= 40


def test_more_ranks_than_workers_is_refused(
    bigstep: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from bigstep.config import LrConfig, RunConfig, WorkersConfig
    from bigstep.engine.build import build
    from bigstep.engine.ranks import Ranks
    from bigstep.errors import ConfigError

    config = RunConfig(workers=WorkersConfig(count=2, local_batch=2), epochs=1, lr=LrConfig(base=0.1))
    with pytest.raises(ConfigError, match="3 ranks were started for 2 workers"):
        build(config, Ranks(rank=0, size=3, device=torch.device("cpu")))


def test_a_gpu_is_given_to_several_ranks_only_if_they_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from bigstep.engine.ranks import joined_ranks
    from bigstep.errors import ConfigError

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device shared was given, but torch sees no GPU"), joined_ranks("shared"):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="has 2 GPUs; .* or use --device shared or cpu"), joined_ranks("cuda"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(bigstep: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    status, _, err = bigstep("train", "--out", "locked/run")
    assert status == 2
    assert "cannot be written" in err
