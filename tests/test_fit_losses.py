"""Losses and metrics of one's own under `fit`: what they may give, and what they may hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bigstep.config import LrConfig, RunConfig, WorkersConfig
from bigstep.errors import ConfigError
from bigstep.train import fit

CONFIG = RunConfig(workers=WorkersConfig(count=4, local_batch=4), epochs=2, lr=LrConfig(base=0.05, scaling="none"))


def classes() -> TensorDataset:
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.argmax(1))


def test_an_own_loss_and_metrics_may_give_their_one_number_in_any_shape() -> None:
    def wrapped(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target).view(1, 1)

    data, facts = classes(), []
    for loss in (nn.functional.cross_entropy, wrapped):
        torch.manual_seed(0)
        found = fit(CONFIG, nn.Linear(3, 3), (data, data), loss, metrics={"entropy": loss}, device="cpu").facts
        facts.append([found[name] for name in ("loss", "eval_loss", "entropy", "weights_sha256")])
    assert facts[0] == facts[1]


def test_a_metric_that_gives_several_numbers_is_named() -> None:
    data, each = classes(), {"each": nn.CrossEntropyLoss(reduction="none")}
    with pytest.raises(ConfigError, match=r"The metric each gave a tensor of \(64,\), but it must give one number"):
        fit(CONFIG, nn.Linear(3, 3), (data, data), nn.functional.cross_entropy, metrics=each, device="cpu")


class Margins(nn.Module):
    """A loss with a layer of its own, as metric learning has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(output), target)


def test_a_loss_whose_parameters_would_stay_as_they_are_is_refused() -> None:
    model, loss, data = nn.Linear(3, 3), Margins(), (classes(), classes())
    with pytest.raises(ConfigError, match="The loss Margins has parameters outside the model"):
        fit(CONFIG, model, data, loss, device="cpu")
    fit(CONFIG, model, data, loss.requires_grad_(False), device="cpu")
    model.layer = loss.requires_grad_(True).layer  # a tied layer is trained with the model
    before = loss.layer.weight.clone()
    fit(CONFIG, model, data, loss, device="cpu")
    assert not torch.equal(loss.layer.weight, before)


def test_a_loss_that_holds_weights_of_classes_follows_the_precision_of_the_run() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    fit(replace(CONFIG, precision="float64"), nn.Linear(3, 3), (classes(), classes()), loss, device="cpu")
    assert loss.weight is not None
    assert loss.weight.dtype == torch.float64
