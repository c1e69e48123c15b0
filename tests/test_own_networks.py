"""Networks of a user's own on several ranks: parameters without a gradient, and buffers that a forward writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigstep.config import (
    ExchangeConfig,
    IslandsConfig,
    LrConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    WorkersConfig,
)
from bigstep.errors import ConfigError, RunError
from bigstep.train import fit
from worlds import World

CONFIG = RunConfig(
    workers=WorkersConfig(count=4, local_batch=4),
    epochs=2,
    lr=LrConfig(base=0.05, scaling="none"),
    optimizer=OptimizerConfig(weight_decay=0.1, decay_all=True),  # a gradient of 0 would shrink what None leaves alone
    precision="float64",
)


class TwoHeads(nn.Module):
    """Uses one head always, the other never, or only in the batches that are meant; counts its forwards."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.head, self.other = use, nn.Linear(6, 3), nn.Linear(6, 3)
        self.register_buffer("forwards", torch.zeros(()))
        self.register_buffer("places", torch.arange(3, dtype=torch.int16))  # a type that no backend sends as it is

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        meant = {"always": True, "never": False, "sometimes": bool(x[0, 0] > 0), "first": bool(self.forwards < 3)}
        is_used = meant[self.use]
        return self.head(x) + self.other(x) if is_used else self.head(x)


def samples() -> tuple[Tensor, Tensor]:
    """Fifty: an epoch of 16 a step ends with two samples, which one worker of four has, and one rank of two."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator)


def train(use: str, config: RunConfig = CONFIG) -> dict[str, Any] | str:
    """Train, and return what came out; of a failure its sentence."""
    model, data = TwoHeads(use), samples()
    try:
        result = fit(config, model, (data, data), device="cpu")
    except (ConfigError, RunError) as error:
        return str(error)
    weights = {name: weight.tolist() for name, weight in model.named_parameters()}
    return {"weights": weights, "loss": result.facts["eval_loss"], "forwards": float(model.forwards)}


@pytest.mark.parametrize("use", ["never", "sometimes"])
def test_parameters_without_a_gradient_stay_as_they_are_on_any_number_of_ranks(
    world: Callable[[int], World], use: str
) -> None:
    alone, *together = train(use), *world(2).run(train, use)
    if use == "never":
        assert alone["weights"]["other.bias"] == TwoHeads(use).other.bias.tolist()  # type: ignore[index]
    for found in together:
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-9), found  # type: ignore[index]
        for name, weight in alone["weights"].items():  # type: ignore[index]
            torch.testing.assert_close(torch.tensor(found["weights"][name]), torch.tensor(weight), rtol=1e-9, atol=0)


def test_a_parameter_that_is_left_out_only_later_is_told_at_once(world: Callable[[int], World]) -> None:
    for said in world(2).run(train, "first"):
        assert "got a gradient in one forward and none in another" in said, said


def test_what_an_exchange_cannot_do_without_is_named(world: Callable[[int], World]) -> None:
    late = replace(CONFIG, exchange=ExchangeConfig(double_buffer=True))
    for said in world(2).run(train, "never", late):
        assert said.startswith("other.bias gets no gradient"), said
        assert "double_buffer" in said


ISLANDS = IslandsConfig(count=2, every=2)
ONE_ISLAND = IslandsConfig(every=2, outer=OuterConfig(name="sgd", lr=1.0))


@pytest.mark.parametrize("islands", [IslandsConfig(), ISLANDS, ONE_ISLAND], ids=["none", "two", "one over both ranks"])
def test_buffers_that_forwards_write_are_those_of_the_first_rank_in_the_end(
    world: Callable[[int], World], islands: IslandsConfig
) -> None:
    """Of seven forwards an epoch one rank of two runs its own; the first has the incomplete batch alone."""
    found = world(2).run(train, "always", replace(CONFIG, islands=islands))
    assert [each["forwards"] for each in found] == [14.0, 14.0]


def pixels(config: RunConfig = CONFIG) -> dict[str, Any]:
    """Label pixels with torch's own loss; of every third image no pixel is labelled."""
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(48, 3, 4, 4, generator=generator), torch.randint(5, (48, 4, 4), generator=generator)
    labels[::3] = -100
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5)), (images, labels)
    result = fit(config, model, (data, data), nn.functional.cross_entropy, device="cpu")
    return {name: result.facts[name] for name in ("loss", "eval_loss", "accuracy")}


def test_a_worker_whose_targets_are_all_left_out_changes_nothing(world: Callable[[int], World]) -> None:
    one_image = replace(CONFIG, workers=WorkersConfig(count=4, local_batch=1))
    alone = pixels(one_image)
    assert alone["loss"] == alone["loss"], "not a number"
    assert alone["eval_loss"] < 2.5
    assert 0 < alone["accuracy"] < 1
    for found in world(2).run(pixels, one_image):
        assert found == pytest.approx(alone, rel=1e-9)


def test_labels_that_are_left_out_count_for_nothing_however_workers_share_a_step() -> None:
    x, y = samples()
    x, y = x[:48], y[:48]
    y[::3] = -100  # what torch's cross-entropy ignores
    ends = []
    for count, local in ((1, 16), (4, 4), (16, 1)):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        config = replace(CONFIG, workers=WorkersConfig(count=count, local_batch=local))
        result = fit(config, model, ((x, y), (x, y)), device="cpu")
        ends.append((result.facts["eval_loss"], result.facts["accuracy"]))
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    assert ends[0] == pytest.approx(ends[2], rel=1e-9)
    with torch.no_grad():
        output, counted = model(x.double()), y >= 0
    assert ends[0][1] == (output.argmax(1) == y)[counted].double().mean().item()
