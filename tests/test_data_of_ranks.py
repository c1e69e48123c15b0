"""Ranks that were given other samples, or in another order, are told before they train; nobody else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Subset, TensorDataset, random_split

from bigstep.config import DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.errors import RunError
from bigstep.train import fit
from worlds import World

CONFIG = RunConfig(
    workers=WorkersConfig(count=4, local_batch=4), epochs=1, lr=LrConfig(base=0.05, scaling="none"),
    data=DataConfig(loaders=0),
)  # fmt: skip


def samples() -> TensorDataset:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.zeros(64, dtype=torch.int64))  # targets alone tell nothing of who is who


def divided(whole: Any) -> list[Subset[Any]]:
    """As a program does that gives no seed: every process divides by numbers of its own."""
    return random_split(whole, [48, 16], torch.Generator().manual_seed(dist.get_rank()))


class DrawnAnew:
    """Items with a target that is drawn in each reading, by numbers that nobody sets back."""

    def __init__(self) -> None:
        self.x, self.drawn = samples().tensors[0], random.Random(dist.get_rank())

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], self.drawn.randrange(2)


def train(given: str) -> str:
    data: Any = {
        "divided tensors": lambda: divided(samples()),
        "divided items": lambda: divided(list(samples())),
        "one less": lambda: (list(samples())[: 64 - dist.get_rank()], list(samples())),
        "alike": lambda: (list(samples()), samples()),
        "drawn anew": lambda: (DrawnAnew(), DrawnAnew()),
    }[given]()
    torch.manual_seed(0)
    try:
        fit(CONFIG, nn.Linear(6, 3), data, device="cpu")
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("given", ["divided tensors", "divided items", "one less"])
def test_ranks_with_different_samples_are_told_at_once(world: Callable[[int], World], given: str) -> None:
    for said in world(2).run(train, given):
        assert said.startswith("The samples of rank 1 differ from those of rank 0 ("), said
        assert "give every rank the same samples in the same order: whole copies" in said


@pytest.mark.parametrize("given", ["alike", "drawn anew"])
def test_nothing_is_said_of_samples_that_are_the_same_but_for_targets_that_are_drawn(
    world: Callable[[int], World], given: str
) -> None:
    assert world(2).run(train, given) == ["", ""]
