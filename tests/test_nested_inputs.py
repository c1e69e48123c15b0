"""Samples whose input is several tensors: a dict, tuple or list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from bigstep.config import DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.data.feed import Feed, Request
from bigstep.errors import BigstepError, ConfigError, DataError
from bigstep.gpu import GraphedStep
from bigstep.train import fit
from worlds import World

CONFIG = RunConfig(
    workers=WorkersConfig(count=4, local_batch=4), epochs=2, lr=LrConfig(base=0.05, scaling="none"),
    precision="float64", data=DataConfig(loaders=0),
)  # fmt: skip


class Pair(NamedTuple):
    two: Tensor
    one: Tensor


class Parts(Dataset[Any]):
    """Fifty vectors of six numbers, in parts; an epoch of 16 a step ends with two."""

    def __init__(self, make: Callable[[Tensor], Any], first: float = 0.0) -> None:
        self.make = make
        self.x = torch.randn(50, 6, generator=torch.Generator().manual_seed(3))
        self.x[0, 0] += first

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        return self.make(self.x[index]), int(self.x[index].argmax() % 3)


def in_parts(x: Tensor) -> dict[str, Any]:
    return {"left": x[:3], "right": Pair(x[3:5], x[5])}


class OfParts(nn.Module):
    """The same network whether it gets a vector or the parts of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3)

    def forward(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            assert isinstance(x["right"], Pair), "its kind is kept"
            x = torch.cat([x["left"], x["right"].two, x["right"].one[:, None]], 1)
        output: Tensor = self.net(x)
        return output


def train(make: Callable[[Tensor], Any], config: RunConfig = CONFIG) -> tuple[list[float], float, float | None]:
    model, data = OfParts(), Parts(make)
    result = fit(config, model, (data, data), device="cpu")
    return model.net.weight.flatten().tolist(), result.facts["eval_loss"], result.accuracy


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_network_is_given_the_parts_of_each_sample_together(loaders: int) -> None:
    assert train(in_parts, replace(CONFIG, data=DataConfig(loaders=loaders))) == train(lambda x: x)


def test_the_path_is_the_same_on_two_ranks(world: Callable[[int], World]) -> None:
    weights, loss, accuracy = train(in_parts)
    for other in world(2).run(train, in_parts):
        assert other[0] == pytest.approx(weights, rel=1e-12)  # another order of sums, in float64
        assert other[1:] == (pytest.approx(loss, rel=1e-12), accuracy)


def test_batches_of_many_chunks_are_put_together_part_by_part() -> None:
    data = Parts(in_parts)
    many = Feed([data[index % 50] for index in range(150)], train=False, dtype=torch.float64)
    ((inputs, targets),) = many([Request(0, torch.arange(150))])
    assert {name: part.dtype for name, part in inputs.items() if name == "left"} == {"left": torch.float64}
    assert torch.equal(inputs["right"].one, data.x[:, 5].double().repeat(3))
    assert len(targets) == 150


def refused(data: Any, config: RunConfig = CONFIG, model: nn.Module | None = None) -> str:
    with pytest.raises(BigstepError) as caught:
        fit(config, model, (data, data), device="cpu")
    assert isinstance(caught.value, ConfigError | DataError)
    return str(caught.value)


def test_what_a_network_cannot_be_given_is_told_with_what_it_is() -> None:
    parts = "{left: torch.float32 of (3,), right: (torch.float32 of (2,), torch.float32 of ())}"
    assert f"is {parts}; convert x" in refused(Parts(in_parts), replace(CONFIG, model="resnet9"))
    flipped = replace(CONFIG, data=DataConfig(augment="flip", loaders=0))
    assert f"is {parts}; set data.augment=none" in refused(Parts(in_parts), flipped, OfParts())
    words = Parts(lambda x: {"text": "word", "left": x})
    assert "Item 0 of Parts is {text: str, left: torch.float32 of (6,)}, int" in refused(words, model=OfParts())
    assert "must be a pair (x, y)" in refused(Parts(lambda x: [1.0, 2.0]), model=OfParts())
    assert "must be a pair (x, y)" in refused(Parts(lambda x: {}), model=OfParts())


def test_a_run_is_not_resumed_with_other_parts(tmp_path: Path) -> None:
    data, other = Parts(in_parts), Parts(lambda x: {"left": x[:2], "right": Pair(x[3:5], x[5])})
    fit(CONFIG, OfParts(), (data, data), device="cpu", out=tmp_path, max_steps=2)
    with pytest.raises(BigstepError, match="data"):
        fit(CONFIG, OfParts(), (other, other), device="cpu", out=tmp_path, resume=True)
    assert fit(CONFIG, OfParts(), (data, data), device="cpu", out=tmp_path, resume=True).steps == 8


def test_a_step_that_is_one_graph_takes_parts_as_it_takes_a_vector() -> None:
    """On a tape in place of a CUDA graph; of the second shape it makes another."""
    x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ends = []
    for make in (in_parts_of_many, lambda x: x):
        model = OfParts().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = GraphedStep(model, nn.functional.cross_entropy, optimizer, precision="float64", emulate=True)
        for some in (x[:4], x[4:8], x[8:10]):
            step(make(some), some.argmax(1) % 3)
        ends.append(model.net.weight.detach().clone())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], OfParts().double().net.weight)


def in_parts_of_many(x: Tensor) -> dict[str, Any]:
    return {"left": x[:, :3], "right": Pair(x[:, 3:5], x[:, 5])}
