"""A run on text takes one path on any number of ranks, though windows, shares and targets are unequal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bigstep.config import CheckpointConfig, DataConfig, LrConfig, OptimizerConfig, RunConfig, WorkersConfig
from bigstep.data import DataPair
from bigstep.engine.build import (
    CPU_TOKENS_PER_FORWARD,
    GPU_BYTES_PER_SCORE,
    Emulation,
    Own,
    _bytes_per_sample,
    build,
)
from bigstep.engine.loop import train
from bigstep.engine.methods.graphed import Graphed
from bigstep.engine.methods.synchronous import Synchronous
from bigstep.engine.observers.base import Audience
from bigstep.engine.ranks import Ranks
from bigstep.models.gpt import GPT
from bigstep.records import read_run
from bigstep.train import fit
from test_text import TEXT, windows
from worlds import World

STEPS = 30
# 92 windows of which the last holds a single target; an epoch of 7 workers x 3 ends with an incomplete batch
TRAIN, TEST = TEXT[: 91 * 15 + 2], TEXT[:400]


def order(**changes: Any) -> RunConfig:
    base = RunConfig(
        recipe="test",
        model="own",
        workers=WorkersConfig(count=7, local_batch=3),
        epochs=8,
        precision="float64",
        lr=LrConfig(base=0.003, scaling="none"),
        optimizer=OptimizerConfig(name="adamw", clip=0.5),
        checkpoint=CheckpointConfig(every=0.4),
        evaluate_every=100,
    )
    return dataclasses.replace(base, **changes)


def train_here(config: RunConfig, folder: str, steps: int, resume: bool = False) -> dict[str, Any]:
    """Train a small GPT with dropout on the ranks of this world, or alone."""
    torch.manual_seed(0)
    model = GPT(vocabulary=256, length=15, depth=1, width=16, heads=2, dropout=0.1)
    data = DataPair(windows(TRAIN, length=15), windows(TEST, length=15))
    result = fit(config, model, data, out=folder, device="cpu", max_steps=steps, resume=resume)
    rows = read_run(Path(folder)).train if Path(folder, "run.json").exists() else []
    return {
        "losses": [row["loss"] for row in rows],
        "sha": result.weights_sha256,
        "eval_loss": result.facts["eval_loss"],
        "bits_per_byte": result.facts["bits_per_byte"],
    }


def test_losses_over_tokens_do_not_depend_on_the_number_of_ranks(world: Callable[[int], World], tmp_path: Path) -> None:
    source = windows(TRAIN, length=15)
    assert source.targets(torch.arange(len(source))).tolist() == [15] * 91 + [1]
    alone = train_here(order(), str(tmp_path / "1"), STEPS)
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][-1] < alone["losses"][0]
    for ranks in (2, 3, 4):
        together = world(ranks).run(train_here, order(), str(tmp_path / str(ranks)), STEPS)
        assert len({result["sha"] for result in together}) == 1, "ranks ended with different weights"
        # float64 rounds at 1e-16, and the difference of two orders of summation grows along 30 steps
        assert together[0]["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert together[0]["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-10)
        assert together[0]["bits_per_byte"] == pytest.approx(alone["bits_per_byte"], rel=1e-10)


def train_without_dropout(windows_of: int, workers: int, folder: str) -> list[dict[str, Any]]:
    """Train so that a rank's workers share a forward; return the rows, on the first rank."""
    torch.manual_seed(0)
    model = GPT(vocabulary=256, length=15, depth=1, width=16, heads=2)
    data = DataPair(windows(TEXT[: windows_of * 15 + 1], length=15), windows(TEST, length=15))
    fit(order(workers=WorkersConfig(count=workers, local_batch=1), epochs=1), model, data, out=folder, device="cpu")
    return read_run(Path(folder)).train if Path(folder, "run.json").exists() else []


def test_a_measured_step_whose_samples_are_all_one_ranks_forward_measures_nothing(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    # step 10, the last of an epoch of 42, has two samples, both the first rank's; on two ranks no forward is cut
    rows, _ = world(2).run(train_without_dropout, 42, 4, str(tmp_path / "run"))
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert rows[-1].get("noise_scale") == rows[-2].get("noise_scale")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_workers_share_a_forward_where_samples_cannot_touch_and_the_step_stays_what_it_was(dropout: float) -> None:
    """On one rank a step of 7 workers is one forward without dropout; with it, each worker draws its own."""
    taken: dict[int, list[torch.Tensor]] = {}
    for limit in (1, 1_000):  # one worker a forward, all of them
        torch.manual_seed(0)
        model = GPT(vocabulary=256, length=15, depth=1, width=16, heads=2, dropout=dropout)
        data = DataPair(windows(TRAIN, length=15), windows(TEST, length=15))
        run = build(order(), Ranks(), Own(model, data))
        assert isinstance(run.method, Synchronous)
        joined = run.method.forwards.max_samples
        assert joined == (1 if dropout else CPU_TOKENS_PER_FORWARD // 15)
        run.method.forwards = dataclasses.replace(run.method.forwards, max_samples=min(limit, joined))
        step = next(run.sampler.steps(1))
        step = dataclasses.replace(step, position=dataclasses.replace(step.position, step=1))  # no step that is cut
        requests = list(run.method.requests([step]))
        assert len(requests) == (1 if limit > 1 and not dropout else 7)
        run.method.accumulate(step, iter(run.train_feed(requests)))
        taken[limit] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for one, together in zip(taken[1], taken[1_000], strict=True):
        torch.testing.assert_close(together, one, rtol=1e-12, atol=1e-15)  # float64, summed in another order


class Mine(torch.nn.Module):
    """A user's own network, whose layers and tied weights nobody here knows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT(vocabulary=256, length=15, depth=1, width=16, heads=2)
        self.bias = torch.nn.Parameter(torch.zeros(256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(tokens) + self.bias
        return scores


class Counted(torch.utils.data.Dataset[Any]):
    """More sequences than anybody would read beforehand."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        tokens = (index + torch.arange(16)) % 256
        return tokens[:-1], tokens[1:]


def test_an_own_module_on_an_own_data_set_reads_what_it_trains_on_and_little_else() -> None:
    data, few = Counted(), torch.utils.data.Subset(Counted(), range(2))
    config = order(data=DataConfig(loaders=0), workers=WorkersConfig(count=1, local_batch=24))
    run = build(config, Ranks(), Own(Mine(), (data, few)))
    bytes_of = _bytes_per_sample(run.learner.model, config, run.train_feed, own=True)  # what a GPU asks for first
    assert bytes_of > 15 * GPU_BYTES_PER_SCORE * 256
    train(run, Audience(), max_steps=3)
    assert data.read <= 3 * 24 + 64, "items were read that no step needed"


def test_an_own_module_takes_its_path_in_whole_step_graphs_too() -> None:
    """What `kernels=graphs` runs on a GPU, on a tape: update and clipping inside, an incomplete batch beside it."""
    losses, weights = {}, {}
    for graphs in (False, True):
        torch.manual_seed(0)
        model, data = Mine(), DataPair(windows(TRAIN, length=15), windows(TEST, length=15))
        config = order(workers=WorkersConfig(count=1, local_batch=24), epochs=3)  # 92 windows: the last batch holds 20
        run = build(config, Ranks(), Own(model, data), Emulation(graphs=graphs))
        assert isinstance(run.method, Synchronous)
        assert isinstance(run.method.passes, Graphed) == graphs
        losses[graphs] = train(run, Audience()).loss
        weights[graphs] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert run.state.position.step == 12
    assert losses[True] == pytest.approx(losses[False], rel=1e-10)  # float64, sums in another order along 12 steps
    torch.testing.assert_close(weights[True], weights[False], rtol=1e-9, atol=1e-12)


def test_a_run_on_text_that_was_interrupted_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = train_here(order(), str(tmp_path / "whole"), 12)
    train_here(order(), str(tmp_path / "parts"), 7)
    parts = train_here(order(), str(tmp_path / "parts"), 12, resume=True)
    assert parts["sha"] == whole["sha"]
    assert parts["losses"] == whole["losses"]


def test_a_run_on_text_goes_on_with_another_number_of_ranks(world: Callable[[int], World], tmp_path: Path) -> None:
    whole = train_here(order(), str(tmp_path / "whole"), 12)
    world(3).run(train_here, order(), str(tmp_path / "parts"), 7)
    parts = world(2).run(train_here, order(), str(tmp_path / "parts"), 12, True)[0]
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-10)  # float64, summed in another order
    assert parts["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=1e-10)
