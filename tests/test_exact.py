"""Exact runs: one SHA-256 of the final weights, whatever the ranks, the collective and the interruptions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigstep import described
from bigstep.check import Pool, check
from bigstep.config import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    IslandsConfig,
    LrConfig,
    NormConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    Stage,
    WorkersConfig,
)
from bigstep.config.edit import make_exact
from bigstep.config.text import config_from_mapping
from bigstep.data import DataPair
from bigstep.engine import fusing
from bigstep.engine.checkpoint import load_latest
from bigstep.engine.exact import fixed_arithmetic
from bigstep.errors import ConfigError
from bigstep.models.gpt import GPT
from bigstep.norm import ExactStatistics, WorkerStatistics
from bigstep.recipes import load
from bigstep.records import read_run
from bigstep.train import fit
from test_text import TEXT, windows
from worlds import World

STEPS = 7

PLAIN = RunConfig(
    recipe="test",
    model="small",
    data=DataConfig(name="embedded", augment="crop_flip", loaders=0),
    workers=WorkersConfig(count=7, local_batch=9),
    epochs=3,
    lr=LrConfig(base=0.5, scaling="none"),
    optimizer=OptimizerConfig(name="sgd", momentum=0.9, nesterov=True, clip=1.0),
    checkpoint=CheckpointConfig(every=0.05),
    evaluate_every=100,
)
# Sony's: batches that grow, LARS, statistics of a moving average
GROWING = dataclasses.replace(
    PLAIN,
    plan=(Stage(epoch=0.15, count=5, local_batch=23),),
    optimizer=OptimizerConfig(name="lars", momentum=0.9),
    norm=NormConfig(zero_gamma=True),
    lr=LrConfig(base=2.0, scaling="none"),
)
ISLANDS = dataclasses.replace(
    PLAIN,
    workers=WorkersConfig(count=8, local_batch=8),
    islands=IslandsConfig(count=4, every=2, outer=OuterConfig(name="nesterov", lr=0.7, momentum=0.8), begin=0.1),
)
KINDS = {
    "plain": PLAIN,
    "growing": GROWING,
    "islands": ISLANDS,
    "muon": dataclasses.replace(PLAIN, optimizer=OptimizerConfig(name="muon"), lr=LrConfig(base=0.02, scaling="none")),
}


def train_here(config: RunConfig, folder: str, steps: int = STEPS, resume: bool = False) -> dict[str, Any]:
    result = fit(config, out=folder, device="cpu", max_steps=steps, resume=resume)
    return _found(result, folder)


def train_text(config: RunConfig, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT(vocabulary=256, length=15, depth=1, width=16, heads=2, dropout=0.1)
    data = DataPair(windows(TEXT[: 91 * 15 + 2], length=15), windows(TEXT[:400], length=15))
    return _found(fit(config, model, data, out=folder, device="cpu", max_steps=STEPS), folder)


def _found(result: Any, folder: str) -> dict[str, Any]:
    rows = read_run(Path(folder)).train if Path(folder, "run.json").exists() else []
    return {
        "sha": result.weights_sha256,
        "losses": [row["loss"] for row in rows],
        "evaluation": (result.facts["accuracy"], result.facts["eval_loss"]),
        "noise": (load_latest(Path(folder) / "checkpoints")[0] or {}).get("noise"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_gives_one_hash(kind: str, world: Callable[[int], World], tmp_path: Path) -> None:
    config = make_exact(KINDS[kind])
    alone = train_here(config, str(tmp_path / "1"))
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][-1] != alone["losses"][0]
    for ranks in (2, 3, 4) if kind == "plain" else (3, 4):
        together = world(ranks).run(train_here, config, str(tmp_path / str(ranks)))
        assert {each["sha"] for each in together} == {alone["sha"]}, f"{ranks} ranks end with other weights"
        assert together[0]["losses"] == alone["losses"]
        assert {each["evaluation"] for each in together} == {alone["evaluation"]}
        assert together[0]["noise"] == alone["noise"]
        assert kind == "islands" or alone["noise"]["noise"] > 0


def test_islands_that_span_ranks_give_the_hash_of_one_rank(world: Callable[[int], World], tmp_path: Path) -> None:
    config = make_exact(dataclasses.replace(ISLANDS, islands=dataclasses.replace(ISLANDS.islands, count=2)))
    alone = train_here(config, str(tmp_path / "1"))
    together = world(4).run(train_here, config, str(tmp_path / "4"))
    assert {each["sha"] for each in together} == {alone["sha"]}
    assert together[0]["losses"] == alone["losses"]


def test_any_collective_gives_one_hash(world: Callable[[int], World], tmp_path: Path) -> None:
    alone = train_here(make_exact(PLAIN), str(tmp_path / "1"), 3)
    for collective in ("torus", "halving", "hierarchical"):
        config = make_exact(dataclasses.replace(PLAIN, exchange=ExchangeConfig(collective=collective)))
        together = world(4).run(train_here, config, str(tmp_path / collective), 3)
        assert {each["sha"] for each in together} == {alone["sha"]}, collective


def test_text_gives_one_hash_with_dropout_and_unequal_targets(world: Callable[[int], World], tmp_path: Path) -> None:
    config = make_exact(
        dataclasses.replace(
            PLAIN,
            model="own",
            data=DataConfig(),
            workers=WorkersConfig(count=7, local_batch=3),
            optimizer=OptimizerConfig(name="adamw", clip=0.5),
            lr=LrConfig(base=0.003, scaling="none"),
        )
    )
    alone = train_text(config, str(tmp_path / "1"))
    for ranks in (2, 3):
        together = world(ranks).run(train_text, config, str(tmp_path / str(ranks)))
        assert {each["sha"] for each in together} == {alone["sha"]}
        assert together[0]["losses"] == alone["losses"]


@pytest.mark.parametrize("kind", ["plain", "islands"])
def test_interruptions_and_other_numbers_of_ranks_leave_no_trace(
    kind: str, world: Callable[[int], World], tmp_path: Path
) -> None:
    config, folder = make_exact(KINDS[kind]), str(tmp_path / "parts")
    whole = train_here(config, str(tmp_path / "whole"))
    world(3).run(train_here, config, folder, 2)
    train_here(config, folder, 4, True)
    world(4).run(train_here, config, folder, 5, True)
    parts = world(2).run(train_here, config, folder, STEPS, True)
    assert {each["sha"] for each in parts} == {whole["sha"]}
    assert parts[0]["losses"] == whole["losses"]
    assert parts[0]["evaluation"] == whole["evaluation"]


class Watched(torch.nn.Linear):
    """Sees how many threads its forwards have."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(3, 2)
        self.threads: set[int] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.threads.add(torch.get_num_threads())
        return super().forward(inputs)


def test_a_forward_has_one_thread_and_the_program_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "as they are")  # the user has decided
    before, data = torch.get_num_threads(), (torch.randn(90, 3), torch.arange(90) % 2)
    config = dataclasses.replace(PLAIN, model="own", data=DataConfig())
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            exact, usual = Watched(), Watched()
            fit(make_exact(config), exact, (data, data), out=tmp_path / f"{threads}", device="cpu", max_steps=2)
            fit(config, usual, (data, data), device="cpu", max_steps=2)
            assert (exact.threads, usual.threads, torch.get_num_threads()) == ({1}, {threads}, threads)
            saved, _ = load_latest(tmp_path / f"{threads}" / "checkpoints")
            assert saved is not None
            assert saved["threads"] == 1, "it is recorded"
    finally:
        torch.set_num_threads(before)


def test_a_gpu_chooses_no_algorithm_by_the_clock_and_adds_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(fusing, "why_not_triton", lambda _: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is put back
    before = cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()
    with fixed_arithmetic(torch.device("cuda")):
        fusing.fuse(torch.nn.Linear(2, 2), make_exact(PLAIN), own=False)
        assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
        assert torch.are_deterministic_algorithms_enabled()
        fusing.fuse(torch.nn.Linear(2, 2), PLAIN, own=False)
        assert cudnn.benchmark, "a run that is not exact takes the fastest"
    assert (cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()) == before


def test_an_exact_run_that_goes_on_on_another_processor_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_exact(dataclasses.replace(PLAIN, model="mlp"))
    train_here(config, str(tmp_path), 1)
    train_here(config, str(tmp_path), 2, True)
    assert not any("promised" in note for note in read_run(tmp_path).notes)
    monkeypatch.setattr(described, "_processor", lambda: "another")
    train_here(config, str(tmp_path), 3, True)
    (told,) = [note for note in read_run(tmp_path).notes if "promised" in note]
    assert "on one processor, but this one was on" in told
    assert "goes on on another: they may differ" in told


def test_the_command_line_makes_a_run_exact(bigstep: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    words = ["--device", "cpu", "--json", "--no-report", "--model", "mlp", "--workers", "2", "--batch", "16", "--set",
             "data.holdout=0.98", "--steps", "2"]  # fmt: skip
    shas = []
    for name in ("one", "two"):
        status, out, err = bigstep("train", "pfn", "--exact", *words, "--out", name)
        assert status == 0, err
        shas.append(json.loads(out)["weights_sha256"])
    config = read_run(tmp_path / "one").config
    assert (config["exact"], config["exchange"]["codec"]) == (True, "exact"), "pfn's own codec is fp16"
    assert shas[0] == shas[1] == read_run(tmp_path / "two").result["weights_sha256"]
    assert len(shas[0]) == 64
    status, _, err = bigstep("train", "downpour", "--exact")
    assert status == 2
    assert "depends on which process is first" in err


def test_the_command_line_checks_an_exact_run(
    bigstep: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunConfig] = []

    def prove(config: RunConfig, **_: Any) -> Any:
        asked.append(config)
        return SimpleNamespace(passed=True, to_mapping=dict)

    monkeypatch.setattr("bigstep.check.check", prove)
    assert bigstep("check", "sony", "--exact", "--json")[0] == 0
    assert asked == [make_exact(load("sony"))]


def test_without_exact_the_ranks_round_differently(world: Callable[[int], World], tmp_path: Path) -> None:
    alone = train_here(PLAIN, str(tmp_path / "1"))
    together = world(3).run(train_here, PLAIN, str(tmp_path / "3"))
    assert together[0]["sha"] != alone["sha"]  # else the tests above could not fail


def test_check_allows_an_exact_run_no_difference_at_all(check_pool: Pool) -> None:
    names = [
        "gradient of P ranks = of one", "path of P ranks = of one", "batch-norm statistics at evaluation",
        "each sample once an evaluation", "resume on other ranks",
    ]  # fmt: skip
    report = check(make_exact(GROWING), ranks=[1, 3], only=names, pool=check_pool)
    for name in names:
        row = report.row(name)
        assert (row.status, row.figure, row.bound) == ("pass", 0.0, 0.0), f"{name}: {row.words}"


def test_check_passes_on_an_exact_run_in_every_row(check_pool: Pool) -> None:
    report = check(make_exact(load("plain")), ranks=[1, 2], pool=check_pool)
    assert report.passed, report.cause


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"exchange": {"codec": "onebit", "collective": "gather"}}, "exchange.codec=onebit"),
        ({"islands": {"count": 2, "every": 4, "codec": "int4"}}, "islands.codec=int4"),
        ({"exchange": {"double_buffer": True}}, "double_buffer"),
        ({"optimizer": {"adagrad": "before"}}, "adagrad=before"),
        ({"asynchronous": {"method": "downpour"}}, "downpour"),
        ({"compile": True}, "compile"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    base = {"workers": {"count": 8, "local_batch": 4}, "epochs": 1, "lr": {"base": 0.1}}
    with pytest.raises(ConfigError, match=named):
        make_exact(config_from_mapping({**base, **changes}))


def test_the_half_precision_of_a_recipe_gives_way() -> None:
    sony = make_exact(load("sony"))
    assert (sony.exact, sony.exchange.codec, sony.exchange.collective) == (True, "exact", "torus")
    islands = make_exact(dataclasses.replace(ISLANDS, islands=dataclasses.replace(ISLANDS.islands, codec="fp16")))
    assert islands.islands.codec == "exact"


def test_exact_statistics_are_the_mean_over_workers() -> None:
    exact, plain = torch.nn.BatchNorm1d(3).double(), torch.nn.BatchNorm1d(3).double()
    summed = ExactStatistics(exact, 0.9, lambda parts, _: torch.stack(list(parts)).sum(0), first=True)
    usual = WorkerStatistics(plain, 0.9)
    for step in range(3):
        for worker in range(4):
            batch = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + worker))
            for statistics, norm in ((summed, exact), (usual, plain)):
                statistics.begin_forward(worker, 1)
                norm(batch)
        summed.end_step(1.0)
        usual.end_step(1.0)
    for statistics in (summed, usual):
        statistics.synchronize(lambda flat: flat)
    # two orders of the same sums in float64
    torch.testing.assert_close(exact.running_mean, plain.running_mean, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(exact.running_var, plain.running_var, rtol=1e-13, atol=1e-13)
