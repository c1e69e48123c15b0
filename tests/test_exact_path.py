"""exchange.codec=exact: the weights of a run have the same bits on any number of ranks, with any collective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from bigstep.config import ExchangeConfig
from bigstep.train import fit
from test_faults_diagnosis import Break, Sixty, order
from test_faults_diagnosis import network as faulty
from test_islands import config, data, network
from worlds import World

EXACT = "exchange.codec=exact"
RULES = {
    "momentum": (),
    "lars": ("optimizer={name: lars, weight_decay: 0.01}", "lr.base=0.5"),
    "adamw, clipped": ("optimizer={name: adamw, weight_decay: 0.1, clip: 0.5}", "lr.base=0.003"),
    "batch plan": ("plan=[{epoch: 1, count: 6, local_batch: 12}]",),
}


def weights_of(folder: str, *settings: str, resume: bool = False) -> dict[str, Any]:
    """Of a run in float32, as plain numbers."""
    inputs, targets = data().tensors
    samples, model = TensorDataset(inputs.float(), targets), network().float()
    run = config("precision=float32", "exchange.bucket_mb=0.001", *settings)
    fit(run, model, (samples, samples), out=folder, resume=resume, device="cpu")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return {name: value.tolist() for name, value in model.state_dict().items() if value.is_floating_point()}


def go_on(folder: str, *settings: str) -> dict[str, Any]:
    return weights_of(folder, *settings, resume=True)


@pytest.mark.parametrize("rule", RULES)
def test_weights_have_the_same_bits_on_any_number_of_ranks(
    world: Callable[[int], World], tmp_path: Path, rule: str
) -> None:
    settings = (EXACT, *RULES[rule])
    alone = weights_of(str(tmp_path / "1"), *settings)
    for ranks, collective in ((2, "ring"), (3, "halving"), (4, "torus")):
        more = (*settings, f"exchange.collective={collective}")
        for weights in world(ranks).run(weights_of, str(tmp_path / f"{ranks}"), *more):
            assert weights == alone, (ranks, collective)
    if rule == "momentum":
        rounded = world(3).run(weights_of, str(tmp_path / "plain"))[0]
        assert rounded != weights_of(str(tmp_path / "plain alone")), "float32 sums round by their order"


def test_a_run_that_is_resumed_on_other_ranks_has_the_same_bits(world: Callable[[int], World], tmp_path: Path) -> None:
    settings = (EXACT, "checkpoint.every=0.4", "checkpoint.keep=20")
    whole = weights_of(str(tmp_path / "whole"), *settings)
    kept = sorted((tmp_path / "whole" / "checkpoints").iterdir())[2]
    (tmp_path / "part" / "checkpoints").mkdir(parents=True)
    (tmp_path / "part" / "checkpoints" / kept.name).write_bytes(kept.read_bytes())
    for weights in world(3).run(go_on, str(tmp_path / "part"), *settings):
        assert weights == whole


def break_exactly(on_rank: int, folder: str, forwards: int) -> tuple[float, int]:
    run = order(nonfinite="skip", exchange=ExchangeConfig(codec="exact"))
    result = fit(run, faulty(Break(forwards, on_rank)), (Sixty(), Sixty()), out=folder, device="cpu")
    return result.loss, result.facts["skipped_steps"]


def test_a_step_in_which_one_worker_is_not_finite_is_found_on_any_number_of_ranks(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    alone = break_exactly(0, str(tmp_path / "1"), 4 * 6 + 3)  # the third of four workers, which waits for the fourth
    assert alone[1] == 1
    # on the second of two ranks it is the first worker, after two rehearsals
    assert world(2).run(break_exactly, 1, str(tmp_path / "2"), 2 + 2 * 6 + 1) == [alone] * 2
