"""Islands: what must be equal is equal, whichever ranks host them, and however a run was broken off."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bigstep.check import Own, Trial, bigstep_loop
from bigstep.config import LrConfig, RunConfig, WorkersConfig
from bigstep.config.text import apply_settings
from bigstep.engine.methods.meeting import Transport
from bigstep.engine.ranks import Ranks
from bigstep.records import read_run
from bigstep.train import fit
from worlds import World

DILOCO = "islands.outer={name: nesterov, lr: 0.7, momentum: 0.9}"
ADAMW = "optimizer={name: adamw, weight_decay: 0.1}"


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(136, 3, 6, 6, generator=generator, dtype=torch.float64)  # 136 = 2 x 64 + 8: a short batch
    return TensorDataset(inputs, torch.randint(0, 4, (136,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 4)]
    return nn.Sequential(*layers).double()


def config(*settings: str) -> RunConfig:
    plain = RunConfig(workers=WorkersConfig(count=16, local_batch=4), epochs=3, lr=LrConfig(base=0.05, scaling="none"))
    quiet = ["precision=float64", "optimizer.momentum=0.9", "checkpoint.every=0", "evaluate_every=10"]
    return apply_settings(plain, [*quiet, *settings])


def path_of(folder: str, *settings: str, resume: bool = False, loaded: bool = False, **options: Any) -> dict[str, Any]:
    model, samples = network(), list(data()) if loaded else data()
    result = fit(config(*settings), model, (samples, samples), out=folder, resume=resume, device="cpu", **options)
    weights = {name: value.tolist() for name, value in model.state_dict().items() if value.is_floating_point()}
    rows = read_run(Path(folder)).train if Path(folder, "run.json").exists() else []
    return {"losses": [row["loss"] for row in rows], "eval": result.facts["eval_loss"], "weights": weights}


def path_of_loaded(folder: str, *settings: str) -> dict[str, Any]:
    return path_of(folder, *settings, "data.loaders=0", loaded=True)


def stop_early(folder: str, *settings: str) -> dict[str, Any]:
    return path_of(folder, *settings, max_steps=4)


def go_on(folder: str, *settings: str) -> dict[str, Any]:
    return path_of(folder, *settings, resume=True)


def close(a: dict[str, Any], b: dict[str, Any], within: float = 1e-10) -> None:
    assert a["losses"] == pytest.approx(b["losses"], rel=within)
    assert a["eval"] == pytest.approx(b["eval"], rel=within)


def test_averaging_every_step_is_synchronous_sgd(tmp_path: Path) -> None:
    plain = ("optimizer.momentum=0", "optimizer.weight_decay=0.01")
    alone = path_of(str(tmp_path / "one"), *plain)
    for count in (2, 4, 16):
        islands = path_of(str(tmp_path / str(count)), *plain, f"islands.count={count}")
        # the mean of updated weights is the update with the mean
        assert islands["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        for name in ("0.weight", "5.weight"):  # an island without samples in a short batch averages no statistics
            ours, theirs = (torch.tensor(run["weights"][name]) for run in (islands, alone))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_one_island_that_goes_all_the_way_is_ordinary_training(tmp_path: Path) -> None:
    alone = path_of(str(tmp_path / "a"))
    outer = "islands.outer={name: sgd, lr: 1.0, momentum: 0.0}"
    close(path_of(str(tmp_path / "b"), outer, "islands.every=2"), alone, within=1e-13)  # theta - (theta - theta_1)
    assert path_of(str(tmp_path / "c"), "islands.every=2") == alone


METHODS = {
    "averaging": ("islands.count=8", "islands.every=2"),
    "DiLoCo with AdamW": ("islands.count=8", "islands.every=2", DILOCO, ADAMW, "lr.base=0.003"),
    "streaming": ("islands.count=8", "islands.every=4", DILOCO, "islands.fragments=2", "islands.overlap=1"),
    "1 bit": ("islands.count=8", "islands.every=2", "islands.codec=onebit"),
    "exact": ("islands.count=8", "islands.every=2", DILOCO, "islands.codec=exact"),
    "half": ("islands.count=8", "islands.every=2", "islands.codec=bf16"),
    "lost meetings": ("islands.count=8", "islands.every=2", "islands.drop=0.4"),
    "post-local": ("islands.count=8", "islands.every=2", "islands.begin=1.4"),
}


@pytest.mark.parametrize("method", METHODS)
def test_which_ranks_host_islands_changes_nothing(world: Callable[[int], World], tmp_path: Path, method: str) -> None:
    alone = path_of(str(tmp_path / "1"), *METHODS[method])
    assert len(alone["losses"]) == 9
    for ranks in (2, 4) if method in ("averaging", "1 bit") else (2,):
        together = world(ranks).run(path_of, str(tmp_path / str(ranks)), *METHODS[method])
        close(together[0], alone)
        if method == "exact":  # the same bits, but for statistics, which are not exchanged but averaged at the end
            names = [name for name in alone["weights"] if "running" not in name]
            assert all(together[0]["weights"][name] == alone["weights"][name] for name in names)
        assert all(rank["weights"] == together[0]["weights"] for rank in together), "ranks end with one network"


@pytest.mark.parametrize("settings", [(), (DILOCO, ADAMW, "lr.base=0.003"), ("islands.begin=1.4",)])
def test_islands_that_span_ranks_take_the_same_path(
    world: Callable[[int], World], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    settings = ("islands.count=2", "islands.every=2", *settings)
    alone = path_of(str(tmp_path / "1"), *settings)
    close(world(4).run(path_of, str(tmp_path / "4"), *settings)[0], alone)


ONE_OVER_RANKS = ("islands.outer={name: sgd, lr: 1.0, momentum: 0.0}", "islands.every=2", "islands.begin=0.4")


def test_an_island_that_spans_ranks_may_begin_while_samples_are_loaded(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    alone = path_of_loaded(str(tmp_path / "1"), *ONE_OVER_RANKS)
    close(world(2).run(path_of_loaded, str(tmp_path / "2"), *ONE_OVER_RANKS)[0], alone)


def test_an_island_that_spans_ranks_goes_on_behind_its_beginning(world: Callable[[int], World], tmp_path: Path) -> None:
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    expected = world(2).run(path_of, whole, *ONE_OVER_RANKS)
    world(2).run(stop_early, broken, *ONE_OVER_RANKS)
    assert world(2).run(go_on, broken, *ONE_OVER_RANKS) == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_broken_off_goes_on(world: Callable[[int], World], tmp_path: Path, method: str) -> None:
    settings = (*METHODS[method], "checkpoint.every=0.4", "checkpoint.keep=20")
    whole = path_of(str(tmp_path / "whole"), *settings)
    kept = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert len(kept) > 4
    for last in (kept[1], kept[4]):
        folder = tmp_path / last.stem
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / last.name).write_bytes(last.read_bytes())
        for name in ("run.json", "metrics.jsonl"):
            (folder / name).write_bytes((tmp_path / "whole" / name).read_bytes())
        resumed = path_of(str(folder), *settings, resume=True)
        assert resumed["losses"] == whole["losses"]
        assert resumed["weights"] == whole["weights"]
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "checkpoints").mkdir(parents=True)
    (elsewhere / "checkpoints" / kept[2].name).write_bytes(kept[2].read_bytes())
    together = world(2).run(go_on, str(elsewhere), *settings)
    assert together[0]["losses"] == pytest.approx(whole["losses"][-len(together[0]["losses"]) :], rel=1e-10)
    assert together[0]["eval"] == pytest.approx(whole["eval"], rel=1e-10)


@pytest.mark.parametrize("codec", ["onebit", "int8", "int4"])
def test_what_a_code_misses_is_kept_for_the_next_meeting(codec: str) -> None:
    transport = Transport(2, Ranks(), config().exchange, codec)
    generator = torch.Generator().manual_seed(1)
    shapes, came, went = [torch.Size([40, 30])], torch.zeros(1200).double(), torch.zeros(1200).double()
    for _ in range(5):
        moved = {island: torch.randn(1200, generator=generator).double() for island in (0, 1)}
        came += sum(moved.values())
        went += transport.start(0, shapes, moved.items(), {0: True, 1: True}).wait()
    kept = sum(kept for island in transport.state_dict().values() for kept in island.values())
    torch.testing.assert_close(went + kept, came, rtol=0, atol=1e-5)  # the code's two means are float32
    transport.close()


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def values_held(islands: int) -> int:
    """Count the numbers in all tensors that a run on one rank leaves alive, each storage once."""
    loop = bigstep_loop()
    settings = (f"islands.count={islands}", "islands.every=2", DILOCO, ADAMW, "lr.base=0.003")
    run = loop.start(Own(dense, None, data()), Trial(config(*settings), 136, 136), Ranks())
    assert loop.train is not None
    loop.train(run, -1, None)
    gc.collect()
    alive = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.dtype == torch.float64]
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() // 8 for each in alive}
    loop.finish(run)
    return sum(held.values())


def test_one_more_island_on_a_rank_holds_one_more_copy_of_weights_and_optimizer_state() -> None:
    size = sum(parameter.numel() for parameter in dense().parameters())
    held = {count: values_held(count) for count in (2, 4, 8)}
    copy = 3 * size  # weights and AdamW's two averages
    assert held[4] - held[2] == 2 * copy
    assert held[8] - held[4] == 4 * copy


class Saved:
    """A tensor that a backward pass waits for; `alive` and `most` count the numbers of all of them."""

    alive = most = 0

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        Saved.alive += tensor.numel()
        Saved.most = max(Saved.most, Saved.alive)

    def __del__(self) -> None:
        Saved.alive -= self.tensor.numel()


def most_activations(islands: int) -> int:
    """Return the most numbers that wait for a backward pass at any time of a run on one rank."""
    loop = bigstep_loop()
    run = loop.start(Own(dense, None, data()), Trial(config(f"islands.count={islands}"), 136, 136), Ranks())
    assert loop.train is not None
    Saved.alive = Saved.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        loop.train(run, -1, None)
    loop.finish(run)
    assert Saved.alive == 0
    return Saved.most


def test_however_many_islands_a_rank_hosts_it_holds_the_activations_of_one() -> None:
    assert most_activations(8) == most_activations(2) > 0
