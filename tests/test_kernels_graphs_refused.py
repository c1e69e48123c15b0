"""Steps that cannot be graphs are refused in a sentence, others tell their own errors; neither leaves a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bigstep.errors import ConfigError
from bigstep.gpu import GraphedStep
from bigstep.gpu.capture import Tapes
from bigstep.optim import LARS
from interpreter import DEVICE

IMAGES, LABELS = torch.randn(4, 3, 4, 4), torch.arange(4)


def network(head: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Dropout(0.5), head).to(DEVICE)


def take_step(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], precision: str = "float32") -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = GraphedStep(model, loss, optimizer, precision=precision, emulate=DEVICE == "cpu")
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    try:
        step(IMAGES.to(DEVICE), LABELS.to(DEVICE))
    finally:
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), random)
        torch.randn(2, device=DEVICE)  # what failed is over


def test_what_cannot_be_graphed_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = LARS(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="CUDA device"):
        GraphedStep(model, nn.MSELoss(), optimizer)
    with pytest.raises(ConfigError, match="allowed are bf16, float32, float64, fp16"):
        GraphedStep(model, nn.MSELoss(), optimizer, precision="fp8")
    with pytest.raises(ConfigError, match="clip=0"):
        GraphedStep(model, nn.MSELoss(), optimizer, clip=0.0)


def test_a_step_that_asks_the_device_for_a_value_is_refused() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = functional.cross_entropy(outputs, targets)
        return value if float(value.detach()) > 0 else -value

    with pytest.raises(ConfigError, match="cannot be one CUDA graph"):
        take_step(network(nn.Linear(32, 5)), loss)


def test_a_layer_that_gets_no_gradient_is_refused_since_plain_steps_take_it() -> None:
    model = network(nn.Linear(32, 5))
    model[-1].unused = nn.Parameter(torch.ones(1, device=DEVICE))
    with pytest.raises(ConfigError, match="cannot be one CUDA graph.*kernels=plain"):
        take_step(model, functional.cross_entropy)


@pytest.mark.parametrize("precision", ["fp16", "float32"])
def test_a_step_that_fails_without_a_graph_too_tells_its_own_error(precision: str) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        take_step(network(nn.Linear(31, 5)), functional.cross_entropy, precision)


def test_a_tape_that_breaks_off_undoes_what_was_done() -> None:
    total = torch.zeros(2)
    with pytest.raises(RuntimeError, match="asks the device for a value"):
        Tapes().capture(lambda: float(total.add_(1).sum()))
    assert total.tolist() == [0, 0]
